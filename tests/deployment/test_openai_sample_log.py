"""The endpoint's log of its own requests: what it holds, who may read it, how large it gets, and what clients see."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.servers.fake_triton import FakeTriton, Tensors, count_up
from support.servers.openai_endpoint import application_of

from handover.errors import ConfigError

INPUTS = ("input_ids", "input_lengths", "request_output_len", "is_return_raw_log_probs", "num_top_log_probs")


def scoring(tensors: Tensors) -> Tensors:
    """``count_up``, which gives a token a log probability of its own number, where that is asked for."""
    outputs = count_up(tensors)
    if tensors.get("is_return_raw_log_probs", np.zeros(1)).any():
        made = outputs["output_ids"][:, :, tensors["input_ids"].shape[1] :]
        outputs["output_raw_log_probs"] = -made.astype(np.float32) / 8
    return outputs


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("letters")
    (directory / "vocab.json").write_text(json.dumps({chr(33 + number): number for number in range(90)}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    return directory


def ask(letters: Path, bodies: list[dict[str, Any]], inputs: tuple[str, ...] = INPUTS, **settings: Any) -> list[Any]:
    """Answers to completions, but for what is new in each: id and time."""

    async def inside(url: str) -> list[Any]:
        async with application_of(url, letters, **settings) as client:
            answers = [await client.post("/v1/completions", json=body) for body in bodies]
            found = [await answer.json() for answer in answers]
        return [{name: value for name, value in each.items() if name not in ("id", "created")} for each in found]

    with FakeTriton(scoring, inputs) as fake:
        return asyncio.run(inside(fake.url))


def test_requests_are_noted_with_the_log_probabilities_given_and_clients_see_no_difference(
    letters: Path, tmp_path: Path
) -> None:
    body = {"prompt": [5, 7], "max_tokens": 4, "ignore_eos": True}
    bodies = [body, {**body, "n": 2}, {**body, "logprobs": 0, "max_tokens": 3}]
    log = tmp_path / "deep" / "requests.jsonl"
    answers = ask(letters, bodies, sample_log=log, sample_share=1)
    assert answers == ask(letters, bodies)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert log.stat().st_mode & 0o777 == 0o600
    assert [line["prompt"] for line in lines] == [[5, 7]] * 4
    assert [line["tokens"] for line in lines] == [[8, 9, 10, 11]] * 3 + [[8, 9, 10]]
    assert lines[3]["log_probs"] == answers[2]["choices"][0]["logprobs"]["token_logprobs"] == [-1, -1.125, -1.25]
    times = [line["time_ns"] for line in lines]
    assert times == sorted(times) and set(lines[0]) == {
        *("time_ns", "model", "model_digest", "prompt", "tokens", "log_probs")
    }


def test_a_share_of_the_requests_is_noted(letters: Path, tmp_path: Path) -> None:
    body = {"prompt": [5, 7], "max_tokens": 1, "ignore_eos": True}
    assert len(ask(letters, [body] * 40, sample_log=tmp_path / "log", sample_share=0.5)) == 40
    assert 0 < len((tmp_path / "log").read_text().splitlines()) < 40
    ask(letters, [body], sample_log=tmp_path / "none", sample_share=0)
    assert (tmp_path / "none").read_text() == ""


def test_the_log_has_a_bounded_size_and_keeps_the_newest(letters: Path, tmp_path: Path) -> None:
    log, old = tmp_path / "log", tmp_path / "log.1"
    log.touch(0o644)
    bodies = [{"prompt": [5, number], "max_tokens": 2, "ignore_eos": True} for number in range(40)]
    long = {"prompt": [3] * 600, "max_tokens": 2, "ignore_eos": True}  # alone more than a half of what may be kept
    ask(letters, [*bodies, long], sample_log=log, sample_share=1, sample_bytes=2000)
    assert log.stat().st_mode & 0o777 == old.stat().st_mode & 0o777 == 0o600
    assert 1000 < log.stat().st_size + old.stat().st_size <= 2000
    kept = [json.loads(line)["prompt"][1] for path in (old, log) for line in path.read_text().splitlines()]
    assert kept == list(range(40 - len(kept), 40))


def test_what_cannot_be_noted_is_refused_before_anything_is_served(letters: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tensor is_return_raw_log_probs"):
        ask(letters, [], INPUTS[:3], sample_log=tmp_path / "log")
    with pytest.raises(ConfigError, match="cannot be written"):
        ask(letters, [], sample_log=tmp_path)
