"""NVIDIA's aiperf, unmodified, on the OpenAI endpoint of a real deployment; its counts beside the engine's metrics."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from support.servers.served import Deployment

from benchmarks.clients.peers import write_tokenizer
from benchmarks.serving.made_up_repository import write_repository
from handover.endpoint import Endpoint

REQUESTS, AT_ONCE = 24, 4
LENGTHS = [5 + number % 7 for number in range(REQUESTS)]
TEMPLATE = "{% for each in messages %}{{ each.content }}{% endfor %}"
COMMON = {"model": "fastertransformer", "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    directory = tmp_path_factory.mktemp("aiperf")
    repository = write_repository(directory, (2, 64, 2), "fp32", 1 << 26)
    (directory / "chat.jinja").write_text(TEMPLATE)
    settings: dict[str, Any] = {"openai_port": 0, "openai_chat_template": directory / "chat.jinja"}
    deployment = Deployment(repository, directory / "run", **settings)
    yield deployment.wait_until_published()
    assert deployment.stop() == 0, deployment.text


def totals(endpoint: Endpoint) -> dict[str, float]:
    """Sums of the engine's own metrics."""
    with urlopen(f"http://127.0.0.1:{endpoint.metrics_port}/metrics", timeout=180) as page:
        text = page.read().decode()
    names = "generation_tokens_total|request_success_total|e2e_request_latency_seconds_sum"
    found: dict[str, float] = {}
    for name, value in re.findall(rf"^vllm:({names})\{{.*\}} (\S+)$", text, re.MULTILINE):
        found[name] = found.get(name, 0) + float(value)
    return found


def records(endpoint: Endpoint, kind: str, bodies: list[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    """What aiperf wrote of each request."""
    write_tokenizer(directory / "tokenizer")
    sessions = [{"session_id": str(number), "payloads": [body]} for number, body in enumerate(bodies)]
    (directory / "inputs.json").write_text(json.dumps({"data": sessions}))
    program, url = Path(os.environ["AIPERF"]).absolute(), f"http://127.0.0.1:{endpoint.openai_port}"
    command = [
        *(str(program), "profile", "-m", "fastertransformer", "--url", url),
        *("--endpoint-type", kind, "--streaming", "--custom-dataset-type", "inputs-json", "--input-file"),
        *(str(directory / "inputs.json"), "--concurrency", str(AT_ONCE), "--request-count", str(len(bodies))),
        *("--tokenizer", str(directory / "tokenizer"), "--use-server-token-count", "--ui", "none"),
        *("--output-artifact-dir", str(directory / "out"), "--workers-max", "1", "--no-gpu-telemetry"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=directory, timeout=240)
    file = directory / "out" / "profile_export.jsonl"
    assert file.is_file(), ended.stdout + ended.stderr
    return [json.loads(line) for line in file.read_text().splitlines()]


def body_of(kind: str, number: int) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}, "max_tokens": LENGTHS[number]}
    text = f"the {number} world"
    asked = {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
    return {**COMMON, **usage, **asked}


# test_load_client.py has aiperf ask for completions.
@pytest.mark.parametrize("kind", [pytest.param("completions", marks=pytest.mark.long), "chat"])
def test_its_counts_are_the_engines(endpoint: Endpoint, kind: str, tmp_path: Path) -> None:
    before = totals(endpoint)
    found = records(endpoint, kind, [body_of(kind, number) for number in range(REQUESTS)], tmp_path)
    assert [record["error"] for record in found if record.get("error")] == [] and len(found) == REQUESTS
    metrics = [record["metrics"] for record in found]
    assert sorted(each["output_sequence_length"]["value"] for each in metrics) == sorted(LENGTHS)
    after = {name: value - before.get(name, 0) for name, value in totals(endpoint).items()}
    assert after["request_success_total"] == REQUESTS and after["generation_tokens_total"] == sum(LENGTHS)
    seen_s = sum(each["request_latency"]["value"] for each in metrics) / 1000
    assert 0 < after["e2e_request_latency_seconds_sum"] < seen_s  # the rest is spent outside the engine
    assert all(each["time_to_first_token"]["value"] <= each["request_latency"]["value"] for each in metrics)
