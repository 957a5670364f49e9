"""The prefix cache where layers keep states: later rows begin with copies, and get what transformers gives each.

Pages and states are full of numbers that must not be read where nothing was written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, Tensors, ask, generated
from support.engines.paged_steps import paged_steps
from support.tiny_models.greedy import NEVER, argmaxes, greedy
from support.tiny_models.llama_models import VOCAB, save

from backends.fastertransformer.engine.cache.page_allocator import PAGE, PageAllocator
from backends.fastertransformer.engine.cache.page_pool import RowPages
from backends.fastertransformer.engine.cache.state_pool import StatePool
from backends.fastertransformer.engine.cache.states import States, StateShape
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows import kept_state
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings

POSITIONS = 320


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_next"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Settings]:
    directory = tmp_path_factory.mktemp("kept")
    changes = {"rms_norm_eps": 1e-2} if request.param == "qwen3_next" else {}  # see test_engine_hybrids
    model = save(request.param, directory, max_position_embeddings=POSITIONS, **changes)
    return model, Settings(directory, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22)


def tokens(count: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(3, VOCAB, count).tolist()
    return drawn


class Served:
    """A scheduler of few pages, and how many tokens its requests have found."""

    def __init__(self, settings: Settings, pages: int = 60, **ways: Any) -> None:
        self.steps = paged_steps(settings, pages)
        self.scheduler, self.allocator = Scheduler(self.steps, 8, **ways), self.steps.cache.allocator
        self.allocator.prefixes._most_unused = pages

    def submit(self, line: list[int], count: int, **told: Any) -> list[Answer]:
        answers: list[Answer] = []
        tensors = ask([line], count, **{"end_id": NEVER, "runtime_top_p": 1e-7} | told)
        self.scheduler.add(Job(parse_request(tensors, self.steps.config), answers.append))
        return answers

    def run(self) -> None:
        while not self.scheduler.is_idle:
            self.scheduler.step()

    def say(self, line: list[int], count: int, **told: Any) -> tuple[Tensors, int]:
        before, answers = self.allocator.prefixes.found, self.submit(line, count, **told)
        self.run()
        assert not isinstance(answers[-1], Failure), answers[-1]
        return answers[-1].tensors, self.allocator.prefixes.found - before


def test_a_conversation_goes_on_at_the_last_page_end_of_its_answer(opened: tuple[Any, Settings]) -> None:
    model, settings = opened
    served, line, found = Served(settings, steps_ahead=True), tokens(20, 1), list[int]()
    for turn, count in enumerate((50, 28, 34)):
        outputs, known = served.say(line, count, is_return_log_probs=True)
        answer = generated(outputs)
        assert len(answer) == count and answer == argmaxes(model, line, answer)
        whole = torch.tensor([*line, *answer])
        with torch.no_grad():
            scores = model(whole[None]).logits[0, len(line) - 1 : -1].log_softmax(-1)
        expected = scores.gather(1, torch.tensor(answer)[:, None])[:, 0].numpy()
        assert np.abs(outputs["output_log_probs"][0, 0] - expected).max() < 1e-4
        line = [*line, *answer, *tokens(10, 2 + turn)]
        found.append(known)
    assert found == [0, 64, 96]  # of 80 tokens and of 118, of which the last was not run
    end = greedy(model, line, 6)[-1]  # where an answer ends, a step that was launched before is surplus
    served.say(line, 40, end_id=end)
    assert served.say([*line, end, *tokens(9, 9)], 3)[1] >= 96


def test_a_context_is_found_at_its_last_page_end_and_where_others_left_it(opened: tuple[Any, Settings]) -> None:
    model, settings = opened
    served, head = Served(settings, steps_ahead=True), tokens(150, 3)
    first, second, third = ([*head, *tokens(count, count)] for count in (60, 70, 80))
    for line, known in ((first, 0), (first, 192), (second, 0), (third, 128), (first[:192], 128), (second, 128)):
        outputs, found = served.say(line, 4)
        assert generated(outputs) == argmaxes(model, line, generated(outputs))
        assert found == known
    assert served.say(first, 4, is_return_context_log_probs=True)[1] == 0
    outputs, found = served.say(first, 6, beam_width=3)
    alone, _ = Served(settings).say(first, 6, beam_width=3)
    assert found == 192
    assert [generated(outputs, 0, beam) for beam in range(3)] == [generated(alone, 0, beam) for beam in range(3)]


@pytest.mark.parametrize("opened", ["nemotron_h", pytest.param("qwen3_next", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize(("own", "more"), [(20, 0), (5, 150)])
def test_rows_that_share_pages_which_others_run_again_come_behind_those(
    own: int, more: int, opened: tuple[Any, Settings]
) -> None:
    """Pages before the one where a state is kept may be forgotten, and are then run again by a row of the same pass."""
    model, settings = opened
    served, head = Served(settings), tokens(112, 3)
    prefixes, kept = served.allocator.prefixes, [*head, *tokens(32, 4)]
    prefixes._ceiling = 100  # what is forgotten is remembered, as a host does
    lines = [[*head, *tokens(own, 5)], [*kept, *tokens(more, 6)]]
    served.say(lines[0], 2)
    served.say(kept, 2)
    gone = prefixes.evict(len(lines[0]) // PAGE)
    served.steps.slots.clear(np.array(gone))
    served.allocator._pool.free(gone)
    answers = [served.submit(line, 8) for line in lines]
    served.run()
    for line, (answer,) in zip(lines, answers, strict=True):
        assert not isinstance(answer, Failure), answer
        assert generated(answer.tensors) == argmaxes(model, line, generated(answer.tensors))
    assert prefixes.found == 128


@pytest.mark.parametrize("opened", ["nemotron_h", pytest.param("qwen3_next", marks=pytest.mark.long)], indirect=True)
def test_mixed_traffic_gets_transformers_tokens(opened: tuple[Any, Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts in chunks, rows that are set back, and states so few that rows take those that are kept."""
    model, settings = opened
    monkeypatch.setattr(kept_state, "LEAST_KEPT", 32)
    served = Served(settings, pages=14, steps_ahead=True, chunk_tokens=16)
    pool = StatePool(6, 6)
    pool.interval = 32
    allocator, generator = served.allocator, np.random.default_rng(3)
    allocator.states = allocator.prefixes._states = pool
    allocator.most_rows, served.scheduler._waiting._max_rows = 5, 5
    heads, asks = [tokens(count, count) for count in (70, 100, 40)], list[tuple[list[int], int, list[Answer]]]()
    for place in range(20):
        line = [*heads[place % 3], *tokens(int(generator.integers(1, 50)), place)]
        if place % 5 == 4:
            line = [*asks[place - 3][0], *(generated(done[0].tensors) if (done := asks[place - 3][2]) else [7])]
        count = int(generator.choice([3, 60, 90]))
        asks.append((line, count, served.submit(line, count)))
        for _ in range(4 * (place % 3)):
            served.scheduler.step()
    served.run()
    for line, count, (answer,) in asks:
        assert not isinstance(answer, Failure), answer
        found = generated(answer.tensors)
        assert len(found) == count and found == argmaxes(model, line, found)
    assert served.scheduler.metrics.preemptions and allocator.prefixes.found > 200
    assert allocator.free == 14 and pool.free == 6


def test_what_a_failed_step_has_kept_is_not_found(
    opened: tuple[Any, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = opened
    served, line = Served(settings), tokens(200, 5)
    extend, calls = served.steps.network.extend, list[int]()

    def fail(*given: Any, **named: Any) -> torch.Tensor:
        calls.append(1)
        return extend(*given, **named) if len(calls) == 1 else 1 / 0  # type: ignore[return-value]

    with monkeypatch.context() as patch:
        patch.setattr(served.steps.network, "extend", fail)
        answers = served.submit(line, 3)
        served.run()
        assert "division" in str(answers[0].problem) and len(calls) == 2
    outputs, found = served.say(line, 3)
    assert found == 0 and generated(outputs) == argmaxes(model, line, generated(outputs))


def test_rows_come_before_what_is_kept_and_that_in_the_order_of_its_use() -> None:
    pool = StatePool(5, 3)
    states = {page: pool.keep(page) for page in (7, 8, 9)}
    assert sorted(states.values()) == [1, 2, 3] and pool.keep(8) == 0
    row, other = RowPages(), RowPages()
    pool.begin(row, 7)  # which is used last now
    assert (row.state, row.origin) == (4, states[7])
    assert pool.keep(10) == states[8] and 8 not in pool and 7 in pool
    assert pool.follow(row, 64) == states[9] and pool.follow(row, 96) == states[9] and row.trail_end == 96
    pool.begin(other)
    assert other.state == 5 and pool.free == 3
    rows = [RowPages() for _ in range(3)]
    pool.begin(rows[0])
    pool.begin(rows[1], 10)
    assert rows[1].origin == states[8] and not row.trail and pool.free == 1
    pool.begin(rows[2])
    assert pool.free == 0 and 7 not in pool and 10 not in pool
    for each in (row, other, *rows):
        pool.release(each)
    assert pool.free == 5


def test_a_row_whose_beginning_is_kept_in_the_last_free_state_goes_on_in_it() -> None:
    pool, row = StatePool(2, 2), RowPages()
    kept = pool.keep(3)
    pool.begin(RowPages())
    pool.begin(row, 3)
    assert (row.state, row.origin) == (kept, 0) and pool.free == 0


def test_a_page_that_is_forgotten_frees_its_state_and_adapters_have_their_own() -> None:
    pool = StatePool(4, 4)
    allocator, ids = PageAllocator(20, most_unused=2, states=pool), np.arange(3 * PAGE)
    row = allocator.take(len(ids))
    allocator.prefixes.add(row.pages, ids)
    assert pool.keep(row.pages[1]) and allocator.prefixes.find(ids) == row.pages[:2]
    assert allocator.prefixes.find(ids, root=-1) == []
    allocator.prefixes.forget(row.pages[1:2], is_dirty=False)
    assert row.pages[1] not in pool and allocator.prefixes.find(ids) == []
    allocator.release([row])
    assert pool.free == 4 and allocator.free == 20


def test_states_are_copied_in_every_layer_before_any_is_written() -> None:
    states = States([StateShape(3, 2, (2, 4)), None, StateShape(5, 1, (2, 2))], 4, CPU)
    for layer in filter(None, states.layers):
        for part in layer:
            part.copy_(torch.arange(float(len(part))).view(-1, *[1] * (part.dim() - 1)).expand_as(part))
    states.place(2, np.array([[1, 2, 3], [2, 3, 0]]))
    assert states.of_slots[2:5].tolist() == [1, 2, 3]
    for layer in filter(None, states.layers):
        for part in layer:
            assert [set(part[state].flatten().tolist()) for state in range(5)] == [{0}, {2}, {3}, {3}, {4}]
