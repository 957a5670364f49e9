"""benchmarks.engine.chat_turns: what its conversations send, and its figures by hand."""

from __future__ import annotations

import asyncio
import csv
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.engine.chat_turns import ChatTurnsArguments, Figures, Reply, converse, main, read_prefix_counts, rows_of

ARGUMENTS = ChatTurnsArguments(turns=4, question=5, answer=3, vocab_size=1000)


def prompts_of(is_alike: bool, seed: str) -> list[list[int]]:
    sent: list[list[int]] = []

    async def ask(prompt: list[int]) -> Reply:
        sent.append(prompt)
        return Reply(1.0, (2000 + len(sent),) * 3)

    found = asyncio.run(converse(ask, ARGUMENTS, is_alike, seed))
    assert [length for length, _ in found] == [5, 13, 21, 29]
    return sent


def test_each_turn_repeats_the_prompt_and_the_answer_before_it() -> None:
    sent = prompts_of(True, "a")
    for number, (before, prompt) in enumerate(pairwise(sent), 1):
        assert prompt[: len(before) + 3] == [*before, *(2000 + number,) * 3] and len(prompt) == len(before) + 3 + 5
    assert sent == prompts_of(True, "a") != prompts_of(True, "b")


def test_prompts_with_nothing_in_common_have_the_same_lengths() -> None:
    sent = prompts_of(False, "a")
    assert [len(prompt) for prompt in sent] == [5, 13, 21, 29]
    assert all(before != prompt[: len(before)] for before, prompt in pairwise(sent))
    assert max(map(max, sent)) < 1000, "answers are not repeated"


def test_the_counters_of_all_engines_are_added() -> None:
    page = """# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="fastertransformer"} 640
vllm:prefix_cache_queries_total{engine="1",model_name="fastertransformer"} 60
vllm:prefix_cache_hits_total{engine="0",model_name="fastertransformer"} 320
vllm:num_requests_running{engine="0",model_name="fastertransformer"} 9
"""
    assert read_prefix_counts(page) == (320, 700)


def test_ratios_are_taken_in_each_round() -> None:
    without, with_it = Figures([10, 20, 30], [1, 2, 4], 0, 0, 99), Figures([5, 6, 7], [0.5, 1, 4], 30, 120, 99)
    off, on = rows_of({(True, False): without, (True, True): with_it})
    assert (off.alike, off.prefix_cache, off.cpu_ratio, off.found, off.requests) == (1, 0, 1, 0, 3)
    assert (on.engine_cpu_s, on.cpu_ratio, on.cpu_ratio_q1, on.cpu_ratio_q3) == (1, 0.5, 0.5, 0.75)
    assert (on.found, on.p50_first_token_ms) == (pytest.approx(0.25), 6)


def test_the_cache_finds_the_full_pages_of_what_a_turn_repeats(tmp_path: Path) -> None:
    sizes = ["--conversations=2", "--at-once=1", "--turns=2", "--question=40", "--answer=2", "--rounds=1"]
    main(["--in-process=true", *sizes, f"--csv={tmp_path / 'chat.csv'}"])
    with (tmp_path / "chat.csv").open() as file:
        rows = {(row["alike"], row["prefix_cache"]): row for row in csv.DictReader(file)}
    assert {key: float(row["found"]) for key, row in rows.items()} == {
        ("1", "0"): 0,
        ("1", "1"): pytest.approx(32 / (40 + 82), abs=1e-4),  # of 41 tokens that have keys and values
        ("0", "0"): 0,
        ("0", "1"): 0,
    }
    assert {row["prompt_tokens"] for row in rows.values()} == {str(2 * (40 + 82))}
