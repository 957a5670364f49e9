"""Pages as rows grow: whichever rows come and go, each gets the tokens that it gets alone, and no page is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.engines.asking import CPU, Tensors, ask, generated, prompts, word_list
from support.engines.paged_steps import paged_steps
from support.engines.remembering_network import remembering_steps
from support.shards.family_shards import write_family
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.shards.random_t5 import random_t5

from backends.fastertransformer.engine.cache.page_allocator import PageAllocator
from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.model.config import ModelConfig
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job, Sequence
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

NEVER, POSITIONS = 4000, 256


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    shards = write_shards(random_gpt2(n_positions=POSITIONS), tmp_path_factory.mktemp("gpt2"))
    return Settings(shards, 1, 1, "fp32", cpu_threads=1)


class Client:
    """One request, and its answers."""

    def __init__(self, scheduler: Scheduler, steps: Steps, tensors: Tensors, is_streaming: bool = False) -> None:
        self.answers: list[Answer] = []
        self.is_cancelled = False
        self.job = Job(
            parse_request(tensors, steps.config), self.answers.append, is_streaming, lambda: self.is_cancelled
        )
        scheduler.add(self.job)

    @property
    def tensors(self) -> Tensors:
        assert not isinstance(self.answers[-1], Failure), self.answers[-1]
        return self.answers[-1].tensors


def run(scheduler: Scheduler, most: int = 20_000) -> int:
    for count in range(most):
        if scheduler.is_idle:
            return count
        scheduler.step()
    raise AssertionError("the scheduler does not come to an end")


@contextmanager
def watched(scheduler: Scheduler) -> Iterator[list[Sequence]]:
    """Note which rows are set back, and that it is always the one that came last, or of one moment was the last."""
    found: list[Sequence] = []
    preempt = Sequence.preempt

    def note(sequence: Sequence) -> None:
        assert len(scheduler._batch) > 0 and not sequence.reservation.rows
        assert all(order(each.job) <= order(sequence.job) for each in scheduler._batch)
        found.append(sequence)
        preempt(sequence)

    add, step, moment = scheduler.add, scheduler.step, 0
    arrived = dict[Job, int]()

    def order(job: Job) -> tuple[int, int, int]:
        """When it came; of one moment the shortest inputs are first if any answer streams, else the longest answers."""
        together = [each for each, moment in arrived.items() if moment == arrived[job]]
        is_streaming = any(each.is_streaming for each in together)
        return arrived[job], job.context_tokens if is_streaming else -job.request.max_tokens, together.index(job)

    def number(job: Job) -> None:
        add(job)
        if any(sequence.job is job for sequence in scheduler._waiting):
            arrived[job] = moment

    def note_and_step() -> None:
        nonlocal moment
        moment += 1
        step()

    with (
        patch.object(Sequence, "preempt", note),
        patch.object(scheduler, "add", number),
        patch.object(scheduler, "step", note_and_step),
    ):
        yield found


# Against a network that remembers tokens, exactly


@dataclass(frozen=True)
class Arrival:
    """A request, and the steps before it and until it is cancelled."""

    lengths: list[int]
    count: int
    pause: int
    kind: int
    is_streaming: bool
    cancelled_after: int | None
    tensors: Tensors = field(init=False, compare=False)

    def __post_init__(self) -> None:
        scalars: dict[str, Any] = [
            {},
            {"runtime_top_k": 7, "repetition_penalty": 1.2},
            {"runtime_top_p": 0.9, "top_p_decay": 0.9, "top_p_min": 0.2},
            {"beam_width": 2},
        ][self.kind]
        end_id = NEVER if self.count % 2 else 17
        seed = sum(self.lengths) + self.count
        # Many begin alike, and share pages.
        rows = [prompts(100, seed=(seed + row) % 3)[0][:length] for row, length in enumerate(self.lengths)]
        tensors = ask(rows, self.count, end_id=end_id, random_seed=seed, **scalars)
        object.__setattr__(self, "tensors", tensors)


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        st.lists(st.integers(1, 90), min_size=1, max_size=2),
        st.integers(0, 160),
        st.integers(0, 12),
        st.sampled_from([0, 0, 1, 2, 3]),
        st.booleans(),
        st.none() | st.integers(0, 60),
    ),
    min_size=1,
    max_size=8,
)

REACH = st.sampled_from([0, 0, 1, 20, 40])  # tokens that a token sees; 0: all


@pytest.fixture(scope="module")
def config(gpt2: Settings) -> ModelConfig:
    return read_config(gpt2.checkpoint, "GPT")


def alone(config: ModelConfig, tensors: Tensors, reach: int) -> Tensors:
    steps = remembering_steps(config, 200, reach)
    scheduler = Scheduler(steps, 8)
    client = Client(scheduler, steps, tensors)
    run(scheduler)
    return client.tensors


def check_pages(scheduler: Scheduler, allocator: PageAllocator) -> None:
    """Every page is free or used by as many rows as are counted: by one, if its tokens are not known."""
    half_run = list(scheduler._waiting)[:1]  # no other that waits has pages
    assert not any(sequence.reservation.rows for sequence in list(scheduler._waiting)[1:])
    rows = [row for sequence in [*scheduler._batch, *half_run] for row in sequence.reservation.rows]
    used = [page for row in rows for page in (*row.pages, *row.copies) if page]
    assert len(set(used)) == allocator.count - allocator.free
    for page in set(used):
        known = allocator.prefixes._known.get(page)
        assert used.count(page) == (known.uses if known else 1)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(
    arrivals=ARRIVALS,
    pages=st.integers(4, 24),
    max_rows=st.integers(1, 8),
    ways=st.integers(0, 3),
    reach=REACH,
    chunks=st.tuples(st.sampled_from([0, 1, 5, 16, 32]), st.booleans()),
    room=st.sampled_from([0, 1, 9, 40]),
)
def test_no_request_starves_and_nothing_is_lost(
    config: ModelConfig,
    arrivals: list[Arrival],
    pages: int,
    max_rows: int,
    ways: int,
    reach: int,
    chunks: tuple[int, bool],
    room: int,
) -> None:
    steps = remembering_steps(config, pages, reach)
    steps.can_mix = lambda rows, tokens, contexts=1: chunks[1]  # type: ignore[method-assign]
    steps.mixed_room = lambda rows: room  # type: ignore[method-assign]
    scheduler = Scheduler(steps, max_rows, is_inflight=ways != 3, steps_ahead=bool(ways % 2), chunk_tokens=chunks[0])
    extended = partial(getattr, steps.network, "extended")
    clients: list[Client] = []
    cancel_at: dict[int, Client] = {}
    now = 0

    def step() -> None:
        nonlocal now
        if client := cancel_at.pop(now, None):
            client.is_cancelled = True
        now += 1
        rows = {sequence: sequence.launched for sequence in scheduler._batch if sequence.needs_step}
        work, before, is_free = len(scheduler._waiting), extended(), not len(scheduler._batch)
        scheduler.step()
        # Every row that decodes has its token, unless it has left; and what waits goes on when the batch is empty.
        assert all(each.launched > count for each, count in rows.items() if each in set(scheduler._batch))
        assert not is_free or not work or len(scheduler._waiting) < work or extended() > before
        check_pages(scheduler, steps.cache.allocator)

    with watched(scheduler):
        for arrival in arrivals:
            for _ in range(arrival.pause):
                step()
            clients.append(Client(scheduler, steps, arrival.tensors, arrival.is_streaming))
            if arrival.cancelled_after is not None:
                cancel_at[now + arrival.cancelled_after] = clients[-1]
        while not scheduler.is_idle:
            step()
            assert now < 20_000
    assert steps.cache.allocator.free == pages and not steps.cache.page_tables.any()
    for client, arrival in zip(clients, arrivals, strict=True):
        last = client.answers[-1]
        assert last.is_final and not any(answer.is_final for answer in client.answers[:-1])
        code = getattr(last, "code", "")
        if code == "INVALID_ARG":
            longest, width = max(arrival.lengths) + arrival.count, 2 if arrival.kind == 3 else 1
            most = min(-(-longest // 32), -(-(reach + 31) // 32) + 2 if reach else longest)
            assert "bytes of KV cache" in str(last.problem) and width * most > pages
        elif code == "CANCELLED":
            assert arrival.cancelled_after is not None
        else:
            expected = alone(config, arrival.tensors, reach)
            np.testing.assert_array_equal(client.tensors["output_ids"], expected["output_ids"])
            counts = [int(answer.tensors["sequence_length"].sum()) for answer in client.answers if answer.tensors]
            is_told_once = len(set(counts)) == len(counts) or not arrival.count  # rows without tokens end one by one
            assert counts == sorted(counts) and (arrival.kind == 3 or is_told_once)


# Against the network itself


def requests_of_all_kinds() -> list[Tensors]:
    stops = np.repeat(word_list([[5, 6], [17, 3, 1]]), 2, 0)
    return [
        ask(prompts(20, seed=1), 150, end_id=NEVER, is_return_log_probs=True),
        ask(prompts(40, 3, seed=2), 90, end_id=NEVER, runtime_top_k=5, random_seed=3, is_return_log_probs=True),
        ask(prompts(33, seed=3), 70, end_id=NEVER, beam_width=2, is_return_log_probs=True),
        ask(prompts(5, 9, seed=4), 120, runtime_top_p=0.9, top_p_decay=0.97, top_p_min=0.3, repetition_penalty=1.1),
        ask(prompts(8, 60, seed=5), 100, stop_words_list=stops, is_return_context_cum_log_probs=True, min_length=50)
        | {"is_return_log_probs": np.ones((2, 1), bool)},
        ask(prompts(64, seed=6), 64, end_id=NEVER, presence_penalty=0.4, is_return_context_log_probs=True),
    ]


# Steps that are taken ahead have more to take back.
@pytest.mark.in_ci(when=lambda at: at.steps_ahead)
@pytest.mark.parametrize(("steps_ahead", "order"), [(False, 1), (True, 1), (True, -1)])
def test_rows_that_are_set_back_go_on_as_if_nothing_had_happened(gpt2: Settings, steps_ahead: bool, order: int) -> None:
    requests, engine = requests_of_all_kinds()[::order], open_engine(gpt2, CPU)
    undisturbed = [engine.generate([engine.parse(tensors)])[0] for tensors in requests]
    engine.close()
    pages = 11 if order > 0 else 9
    steps = paged_steps(gpt2, pages)
    scheduler = Scheduler(steps, 16, steps_ahead=steps_ahead)
    clients = []
    with watched(scheduler) as set_back:
        for place, tensors in enumerate(requests):  # one in each step: they keep their order
            clients.append(Client(scheduler, steps, tensors, place % 2 == 0))
            scheduler.step()
        run(scheduler)
    assert order < 0 or {sequence.width for sequence in set_back} == {1, 2}
    assert len({each.job for each in set_back}) >= (3 if order > 0 else 2)
    assert any(sequence.sampling.is_sampled for sequence in set_back)
    for client, expected in zip(clients, undisturbed, strict=True):
        assert set(client.tensors) == set(expected)
        for name, values in expected.items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(client.tensors[name], values, atol=1e-3)
            else:
                np.testing.assert_array_equal(client.tensors[name], values)
    for client in clients[::2]:  # they stream
        whole = [generated(client.tensors, row) for row in range(len(client.tensors["output_ids"]))]
        seen = [[0] * len(whole)]
        for answer in client.answers:
            assert answer.tensors
            rows = [generated(answer.tensors, row) for row in range(len(whole))]
            if client.tensors["output_ids"].shape[1] == 1:
                assert all(row == full[: len(row)] for row, full in zip(rows, whole, strict=True))
                assert sum(map(len, rows)) > sum(seen[-1])
            seen.append([len(row) for row in rows])
    assert steps.cache.allocator.free == pages


def test_an_encoder_decoder_is_set_back_too(tmp_path: Path) -> None:
    shards = write_family(random_t5(), tmp_path, 1)
    settings = Settings(shards, 1, 1, "fp32", model_type="T5", cpu_threads=1)
    engine = open_engine(settings, CPU)
    requests = []
    for index, (length, scalars) in enumerate(
        [(9, {}), (40, {"beam_width": 2}), (12, {"runtime_top_k": 5}), (20, {"is_return_log_probs": True})]
    ):
        tensors = ask(prompts(length, seed=index), 120, end_id=NEVER, random_seed=index, **scalars)
        tensors["sequence_length"] = tensors.pop("input_lengths").astype(np.uint32)
        tensors["max_output_len"] = tensors.pop("request_output_len")
        requests.append(tensors)
    undisturbed = [engine.generate([engine.parse(tensors)])[0]["output_ids"] for tensors in requests]
    engine.close()
    steps = paged_steps(settings, pages=13)
    scheduler = Scheduler(steps, 16)
    with watched(scheduler) as set_back:
        clients = [Client(scheduler, steps, tensors) for tensors in requests]
        run(scheduler)
    assert any(each.width == 2 for each in set_back) and steps.cache.allocator.free == 13
    for client, expected in zip(clients, undisturbed, strict=True):
        np.testing.assert_array_equal(client.tensors["output_ids"], expected)


def test_a_conversation_is_set_back_and_its_earlier_turns_are_computed_again(gpt2: Settings) -> None:
    """A conversation that has room, against one that is set back, and one whose pages are taken while it waits."""
    found: list[list[Any]] = []
    for pages in (200, 8, 6):
        steps = paged_steps(gpt2, pages)
        scheduler = Scheduler(steps, 8, steps_ahead=True)
        turns: list[Any] = []
        with watched(scheduler) as set_back:
            for turn in range(2):
                other = Client(scheduler, steps, ask(prompts(30, seed=turn), 120, end_id=NEVER))
                for _ in range(3):
                    scheduler.step()
                answers: list[Answer] = []
                tensors = ask(prompts(20, seed=10 + turn), 70, end_id=NEVER)
                tensors |= {"START": np.array([turn == 0], np.int32), "END": np.array([turn == 1], np.int32)}
                scheduler.add(Job(parse_request(tensors, steps.config), answers.append, session="talk"))
                while not answers:
                    scheduler.step()
                assert not isinstance(answers[-1], Failure), answers[-1]
                turns.append(answers[-1].tensors["output_ids"].tolist())
                other.is_cancelled = True
                run(scheduler)
        found.append(turns)
        assert bool(set_back) == (pages < 200) and steps.cache.allocator.free == pages
    assert found[0] == found[1] == found[2]


def test_a_cancelled_request_frees_its_pages_at_once(gpt2: Settings) -> None:
    steps = paged_steps(gpt2, pages=40)
    scheduler = Scheduler(steps, 8, steps_ahead=True)
    kept = Client(scheduler, steps, ask(prompts(10), 100, end_id=NEVER))
    gone = Client(scheduler, steps, ask(prompts(70, 50), 100, end_id=NEVER))
    for _ in range(4):
        scheduler.step()
    assert steps.cache.allocator.free == 40 - 1 - 3 - 2
    gone.is_cancelled = True
    scheduler.step()
    assert gone.answers[-1].code == "CANCELLED" and steps.cache.allocator.free == 40 - 1
    run(scheduler)
    assert len(generated(kept.tensors)) == 100 and torch.equal(
        steps.cache.windows, torch.ones_like(steps.cache.windows)
    )
