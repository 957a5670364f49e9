"""The OpenAI endpoint of a deployment when its process is killed, and when the deployment is asked to stop."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from support.servers.served import Deployment, wait_for

from benchmarks.serving.made_up_repository import write_repository
from deployment.processes.linux import command_line, descendants
from handover.endpoint import Endpoint

LONG = 900
BODY = {"model": "fastertransformer", "prompt": list(range(40, 60)), "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("made_up"), (2, 64, 2), "fp32", 1 << 26)


def ask(endpoint: Endpoint, **more: Any) -> Any:
    url = f"http://127.0.0.1:{endpoint.openai_port}/v1/completions"
    request = Request(url, json.dumps({**BODY, **more}).encode(), {"Content-Type": "application/json"})
    return urlopen(request, timeout=180)


def answer(endpoint: Endpoint) -> list[int]:
    with ask(endpoint, max_tokens=8, return_token_ids=True) as given:
        found: list[int] = json.load(given)["choices"][0]["token_ids"]
    return found


def endpoint_pid(deployment: Deployment) -> int:
    below = descendants([deployment.process.pid])
    return next(each.pid for each in below if "deployment.openai" in command_line(each.pid))


def in_use(endpoint: Endpoint) -> float:
    """Requests that the engine works on, and the part of its pages that they hold."""
    with urlopen(f"http://127.0.0.1:{endpoint.metrics_port}/metrics", timeout=180) as page:
        text = page.read().decode()
    names = "num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    values = re.findall(rf"^vllm:(?:{names})\{{.*\}} (\S+)$", text, re.MULTILINE)
    assert len(values) == 3
    return sum(map(float, values))


def test_a_killed_endpoint_comes_back_while_the_server_goes_on(repository: Path, tmp_path: Path) -> None:
    deployment = Deployment(repository, tmp_path / "run", openai_port=0)
    endpoint = deployment.wait_until_published()
    expected, (server,) = answer(endpoint), deployment.pids_of("tritonserver")
    with ask(endpoint, max_tokens=LONG, stream=True) as stream:
        stream.readline()
        wait_for(lambda: in_use(endpoint) > 0)
        os.kill(endpoint_pid(deployment), signal.SIGKILL)
        with suppress(http.client.IncompleteRead, ConnectionError):
            assert b"[DONE]" not in stream.read()
    wait_for(lambda: "was killed by SIGKILL; started again, 1 of 3 within ten minutes" in deployment.text)
    wait_for(lambda: can_answer(endpoint))
    assert answer(endpoint) == expected  # at the same address
    wait_for(lambda: in_use(endpoint) == 0)  # the request of the one that died has been cancelled
    assert deployment.pids_of("tritonserver") == [server]
    for number in (2, 3):
        os.kill(endpoint_pid(deployment), signal.SIGKILL)
        wait_for(partial(says, deployment, f"started again, {number} of 3"))
    os.kill(endpoint_pid(deployment), signal.SIGKILL)
    assert deployment.process.wait(240) == 1
    assert "the OpenAI endpoint was killed by SIGKILL, for the fourth time within ten minutes" in deployment.text
    assert deployment.processes == {}


def says(deployment: Deployment, words: str) -> bool:
    return words in deployment.text


def can_answer(endpoint: Endpoint) -> bool:
    with suppress(OSError), urlopen(f"http://127.0.0.1:{endpoint.openai_port}/health", timeout=5):
        return True
    return False


def test_streams_in_flight_are_complete_when_the_deployment_stops(repository: Path, tmp_path: Path) -> None:
    settings = {"openai_processes": 2, "openai_access_log": tmp_path / "logs" / "access.jsonl", "exit_timeout_s": 20}
    deployment = Deployment(repository, tmp_path / "run", openai_port=0, **settings)
    endpoint = deployment.wait_until_published()
    streams = [ask(endpoint, max_tokens=LONG, stream=True) for _ in range(3)]
    assert all(stream.readline().startswith(b"data: {") for stream in streams)
    deployment.process.send_signal(signal.SIGTERM)
    wait_for(lambda: not deployment.endpoint_file.exists())  # no other client finds it
    for stream in streams:
        events = stream.read().split(b"\n\n")
        assert events[-2:] == [b"data: [DONE]", b""] and len(events) - 1 == LONG  # with the first, which was read above
        assert json.loads(events[-3].removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"
        stream.close()
    assert deployment.stop(timeout_s=180) == 0, deployment.text
    lines = [json.loads(line) for line in (tmp_path / "logs" / "access.jsonl").read_text().splitlines()]
    asked = [(each["status"], each["completion_tokens"]) for each in lines if each["path"] == "/v1/completions"]
    assert asked == [(200, LONG)] * 3
