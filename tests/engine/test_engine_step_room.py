"""How many tokens of contexts a step runs beside rows that decode, where both are one pass: on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.engines.asking import ask, generated, prompts
from support.engines.paged_steps import paged_steps
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.tiny_models.greedy import NEVER, greedy
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling import chunks, prefill_pass, step_room
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.scheduling.tuning import TUNING
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

Gpt2 = tuple[GPT2LMHeadModel, Settings]
ROOM, PASS, BUDGET = 40, 170, 16  # tokens of the largest captured pass, of any, and of a chunk's step


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Gpt2:
    model = random_gpt2(n_positions=256)
    return model, Settings(write_shards(model, tmp_path_factory.mktemp("gpt2")), 1, 1, "fp32", cpu_threads=1)


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """The tokens of each context, by pass; a pass with rows that decode has a captured size or is larger than any."""
    found, mix, extend = list[list[int]](), Steps.mix, Steps.extend

    def note_mix(self: Steps, ids: Any, starts: Any, lengths: Any, first: int) -> Any:
        found.append(lengths.tolist())
        return mix(self, ids, starts, lengths, first)

    def note_extend(self: Steps, ids: Any, starts: Any, lengths: Any, first: int, embeddings: Any = None) -> Any:
        found.append(lengths.tolist())
        return extend(self, ids, starts, lengths, first, embeddings)

    monkeypatch.setattr(Steps, "mix", note_mix)
    monkeypatch.setattr(Steps, "extend", note_extend)
    monkeypatch.setattr(Steps, "can_mix", lambda _, rows, tokens, contexts=1: not ROOM < rows + tokens < 3 * ROOM)
    monkeypatch.setattr(Steps, "mixed_room", lambda _, rows: ROOM - rows)
    monkeypatch.setattr(step_room, "TUNING", replace(TUNING, burst_tokens=100))
    monkeypatch.setattr(prefill_pass, "TUNING", replace(TUNING, pass_tokens_cpu=PASS))
    monkeypatch.setattr(chunks, "TUNING", replace(TUNING, attention_cost=1e-9))
    yield found


class Served:
    """A scheduler with four rows that decode for long."""

    def __init__(self, gpt2: Gpt2) -> None:
        self.model, self.scheduler = gpt2[0], Scheduler(paged_steps(gpt2[1]), 64, steps_ahead=True, chunk_tokens=BUDGET)
        self.asked: list[tuple[list[int], int, list[Answer]]] = []
        self.steps = 0
        self.submit([1] * 4, 60, is_streaming=True)
        self.step(2)

    def submit(self, lengths: Sequence[int], *counts: int, is_streaming: bool) -> None:
        """Submit requests of one row that arrive at once."""
        lines = prompts(*lengths, seed=len(self.asked))
        for line, count in zip(lines, counts if len(counts) > 1 else counts * len(lines), strict=True):
            answers = list[Answer]()
            self.asked.append((line, count, answers))
            request = parse_request(ask([line], count, end_id=NEVER), self.scheduler._steps.config)
            self.scheduler.add(Job(request, answers.append, is_streaming=is_streaming))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.scheduler.step()
            self.steps += 1

    def finish(self) -> None:
        """Take all steps, and compare every answer with transformers'."""
        while not self.scheduler.is_idle:
            self.step()
        for line, count, answers in self.asked:
            assert (
                answers[-1].tensors and generated(answers[-1].tensors) == greedy(self.model, line, count)[len(line) :]
            )


def test_while_little_waits_a_step_stays_a_captured_pass(gpt2: Gpt2, contexts: list[list[int]]) -> None:
    served = Served(gpt2)
    contexts.clear()
    served.submit([20, 16, 9, 3, 25], 8, is_streaming=True)
    served.step(4)
    assert contexts == [[3, 9, 16], [20], [25]]  # the shortest first
    served.finish()


def test_a_burst_is_run_in_few_large_passes(gpt2: Gpt2, contexts: list[list[int]]) -> None:
    served = Served(gpt2)
    contexts.clear()
    served.submit([31] * 5, 8, is_streaming=True)
    served.step()
    assert contexts == [[31] * 5]
    served.finish()


def test_a_prompt_with_more_tokens_than_a_captured_pass_is_cut(gpt2: Gpt2, contexts: list[list[int]]) -> None:
    served = Served(gpt2)
    contexts.clear()
    served.submit([20, 50, 29], 8, is_streaming=True)
    served.step(2)
    assert contexts == [[20], [29]]
    served.finish()
    assert contexts[2:] == [[25], [25]]


def test_a_large_burst_has_several_passes_a_step_of_which_one_decodes(gpt2: Gpt2, contexts: list[list[int]]) -> None:
    served = Served(gpt2)
    contexts.clear()
    served.submit([30 + place for place in range(12)], 8, is_streaming=True)
    before = [sequence.launched for sequence in served.scheduler._batch]
    served.step()
    assert [sequence.launched for sequence in served.scheduler._batch][:4] == [count + 1 for count in before]
    assert contexts == [[30, 31, 32, 33, 34], [35, 36, 37, 38]]  # of 426 tokens at most 340, rows that decode included
    served.finish()


def test_streams_that_arrive_at_once_begin_with_the_shortest_and_whole_answers_with_the_longest(
    gpt2: Gpt2, contexts: list[list[int]]
) -> None:
    for is_streaming, first in ((True, 7), (False, 21)):
        served = Served(gpt2)
        contexts.clear()
        served.submit([22, 7, 21, 23], 9, 8, 12, 10, is_streaming=is_streaming)
        served.step()
        assert contexts[0][0] == first
        served.finish()
