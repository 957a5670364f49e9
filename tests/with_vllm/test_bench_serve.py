"""``vllm bench serve``, unmodified, on the OpenAI endpoint of a real deployment.

Oracles: what was asked for, the engine's own metrics, transformers' tokenizer, and this project's load client.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.servers.llama_endpoint import LLAMA, MODEL, LlamaEndpoint, llama_endpoint
from transformers import AutoTokenizer

from evaluation import load
from evaluation.speed.load_arguments import LoadArguments
from evaluation.speed.tables.table import LOAD_TABLE
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

PATHS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
REQUESTS, AT_ONCE, GIVEN, WANTED = 20, 4, 32, 12
RANDOM = ("--random-input-len", str(GIVEN), "--random-output-len", str(WANTED))
TEXTS = [
    (f"She looked at the {number} ships." * (1 + number % 3), "They were far away" + " again" * (number % 7))
    for number in range(REQUESTS)
]
"""Prompts and answers of a file; of the answers the program takes the lengths."""


@dataclass(frozen=True)
class Served(LlamaEndpoint):
    """The endpoint, and the model as a directory of Hugging Face."""

    huggingface: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("bench")
    huggingface = root / "hf_fp32"
    convert(ConvertArguments(LLAMA, huggingface, weight_data_type="fp32", format="huggingface"))
    with llama_endpoint(root) as endpoint:
        yield Served(endpoint.url, huggingface)


def bench(served: Served, backend: str, directory: Path, *dataset: str) -> dict[str, Any]:
    """The result that the program saves, with the figures of each request."""
    command = [
        *(str(Path(os.environ["VLLM"]).absolute()), "bench", "serve", "--backend", backend),
        *("--base-url", served.url, "--endpoint", PATHS[backend], "--model", MODEL, "--temperature", "0"),
        *("--tokenizer", str(served.huggingface), "--num-prompts", str(REQUESTS), "--max-concurrency", str(AT_ONCE)),
        *("--save-result", "--save-detailed", "--result-dir", str(directory), "--result-filename", "result.json"),
        *("--disable-tqdm", "--ignore-eos", *dataset),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_TARGET_DEVICE": "cpu"}
    ended = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]
    assert "WARNING: /tokenize unavailable" not in ended.stdout
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def check(served: Served, before: dict[str, float], result: dict[str, Any], wanted: list[int], events: int) -> None:
    """Every request was answered with what it asked for, and the engine has counted the same.

    ``events`` are those of an answer that the client takes for a token's beside its tokens.
    """
    assert (result["completed"], result["failed"]) == (REQUESTS, 0) and set(result["errors"]) == {""}
    assert result["output_lens"] == wanted and result["total_output_tokens"] == sum(wanted)
    assert [len(gaps) + 1 - events for gaps in result["itls"]] == wanted
    assert all(0 < first <= whole for first, whole in zip(result["ttfts"], result["latencies"], strict=True))
    counted = {
        "request_success_total": REQUESTS,
        "generation_tokens_total": sum(wanted),
        "prompt_tokens_total": result["total_input_tokens"],
    }
    after = served.counts()
    assert {name: after[name] - before.get(name, 0) for name in counted} == counted


# The role's event, which comes with the first token, is vLLM's own way of streaming too.
@pytest.mark.parametrize(("backend", "events"), [("openai", 0), ("openai-chat", 1)])
def test_random_prompts(served: Served, backend: str, events: int, tmp_path: Path) -> None:
    before = served.counts()
    result = bench(served, backend, tmp_path, "--dataset-name", "random", *RANDOM)
    check(served, before, result, [WANTED] * REQUESTS, events)
    # The program's own remark: random tokens may be decoded to a text of some tokens more or fewer.
    assert result["total_input_tokens"] == pytest.approx(GIVEN * REQUESTS, rel=0.02)
    if backend == "openai":
        check_times(served, result, tmp_path / "load")


@pytest.mark.parametrize(("backend", "events"), [("openai", 0), ("openai-chat", 1)])
def test_prompts_of_a_file(served: Served, backend: str, events: int, tmp_path: Path) -> None:
    file = tmp_path / "conversations.json"
    turns = [{"conversations": [{"from": "human", "value": one}, {"from": "gpt", "value": two}]} for one, two in TEXTS]
    file.write_text(json.dumps(turns))
    tokenizer = AutoTokenizer.from_pretrained(served.huggingface)
    given, wanted = ([len(tokenizer(text)["input_ids"]) for text in side] for side in zip(*TEXTS, strict=True))
    before = served.counts()
    dataset = ("--dataset-name", "sharegpt", "--dataset-path", str(file), "--disable-shuffle")
    result = bench(served, backend, tmp_path, *dataset)
    check(served, before, result, wanted, events)
    assert result["input_lens"] == given and len(set(wanted)) > 3


def check_times(served: Served, result: dict[str, Any], output: Path) -> None:
    """This project's load client measures times of the same order at the same load."""
    given = LoadArguments(
        endpoint=f"{served.url}/v1",
        output=output,
        lengths=(f"{GIVEN}/{WANTED}",),
        concurrencies=(AT_ONCE,),
        requests=REQUESTS,
        repeats=1,
        min_repeats=1,
        vocab_size=8000,
    )
    load.main(given.to_argv())
    (row,) = LOAD_TABLE.read(output / "load.csv")
    assert (row.state, row.failed_requests) == ("ok", 0)
    for theirs, ours in (("mean_ttft_ms", "ttft_mean_ms"), ("mean_itl_ms", "itl_mean_ms")):
        measured = row.figures[ours]
        assert measured is not None and 1 / 5 < result[theirs] / measured < 5, (theirs, result[theirs], measured)
