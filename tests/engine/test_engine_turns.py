"""A small request beside one of many rows: what runs before its first token, and that all are answered in the end."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from support.engines.asking import ask, prompts, tiny_gpt2
from support.engines.paged_steps import paged_steps
from support.tiny_models.greedy import NEVER

from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job, Sequence
from backends.fastertransformer.engine.scheduling.batch import Batch
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings

ROWS = 100
LENGTH = 40
PASS_TOKENS = 512  # at most, on a CPU
SCORES: dict[str, Any] = {"is_return_context_log_probs": True, "num_context_top_log_probs": 20}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"))[1]


class Served:
    """A scheduler, and the contexts of each of its passes: name of the request, and tokens."""

    def __init__(self, settings: Settings, monkeypatch: pytest.MonkeyPatch, max_rows: int = 128) -> None:
        self.steps = paged_steps(settings, 500)
        self.scheduler = Scheduler(self.steps, max_rows, chunk_tokens=256)
        self.passes: list[list[tuple[str, int]]] = []
        self._seeds, prefill = count(), Batch.prefill

        def note(batch: Batch, new: list[Sequence]) -> Any:
            self.passes.append([(each.job.name, len(each.context.ids)) for each in new])
            return prefill(batch, new)

        monkeypatch.setattr(Batch, "prefill", note)

    def submit(self, name: str, rows: int = 1, length: int = LENGTH, tokens: int = 3, **more: Any) -> list[Answer]:
        answers: list[Answer] = []
        tensors = ask(prompts(*[length] * rows, seed=next(self._seeds)), tokens, end_id=NEVER, **more)
        self.scheduler.add(Job(parse_request(tensors, self.steps.config), answers.append, name=name))
        return answers

    def run(self, answers: list[Answer]) -> int:
        """Take steps until a request is answered; returns how many."""
        steps = 0
        while not answers:
            self.scheduler.step()
            steps += 1
        assert not isinstance(answers[-1], Failure), answers[-1]
        return steps


@pytest.mark.parametrize("is_one", [True, False], ids=["one request", "the answers of one"])
@pytest.mark.parametrize("scores", [{}, SCORES], ids=["plain", "scored"])
def test_a_small_request_joins_in_the_next_pass(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, scores: dict[str, Any], is_one: bool
) -> None:
    served = Served(settings, monkeypatch)
    if is_one:
        large = [served.submit("large", ROWS, tokens=1, **scores)]
    else:
        large = [served.submit(f"large-{row}", tokens=1, **scores) for row in range(ROWS)]
    served.scheduler.step()
    assert served.run(served.submit("small", length=4)) == 3  # tokens
    assert ("small", 4) in served.passes[1]
    limit = PASS_TOKENS // (2 if scores else 1)
    assert all(sum(tokens for name, tokens in each if name != "small") <= limit for each in served.passes)
    for answers in large:
        served.run(answers)
    assert sum(len(each) for each in served.passes) == ROWS + 1


def test_a_request_that_has_all_rows_makes_way_for_an_eighth_of_others(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that come find a row each, up to an eighth; the next waits, and the large request's answer is the same."""
    alone = Served(settings, monkeypatch, max_rows=16)
    expected = alone.submit("large", 16, length=8, tokens=30)
    alone.run(expected)
    served = Served(settings, monkeypatch, max_rows=16)
    large = served.submit("large", 16, length=8, tokens=30)
    for _ in range(3):
        served.scheduler.step()
    smalls = [served.submit(f"small {number}", length=4, tokens=3) for number in range(2)]
    assert served.run(smalls[0]) == 3
    assert not large and all(smalls)
    served.run(large)
    assert served.scheduler.metrics.preemptions == 2
    for name in ("output_ids", "sequence_length"):
        assert (large[-1].tensors[name] == expected[-1].tensors[name]).all()  # type: ignore[union-attr]


def test_rows_of_a_large_request_come_although_small_ones_keep_coming(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(settings, monkeypatch, max_rows=1)  # one row at a time, so that they are in each other's way
    large = served.submit("large", 12, tokens=1)
    smalls = [served.submit(f"small {number}", tokens=1) for number in range(2)]
    while not large:
        served.scheduler.step()
        smalls.append(served.submit(f"small {len(smalls)}", tokens=1))
    order = [name for ((name, _),) in served.passes]
    assert order[:4] == ["large"] * 4 and order[4] == "small 0"  # a quarter of a pass comes first
    assert order.count("large") == 12 and len(order) < 100
    assert [name for name in order if name != "large"] == [f"small {number}" for number in range(len(order) - 12)]


def test_requests_of_one_row_come_in_order(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(settings, monkeypatch, max_rows=1)
    names = [f"{number} of some" for number in range(12)]
    for number, name in enumerate(names):
        last = served.submit(name, length=5 + 7 * number % 40, tokens=1)
        if number % 3 == 0:
            served.scheduler.step()
    served.run(last)
    assert [name for ((name, _),) in served.passes] == names
