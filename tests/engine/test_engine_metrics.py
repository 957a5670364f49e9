"""What the scheduler counts, against a clock that a test moves and against the answers themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines.asking import CPU, Tensors, ask, generated, prompts, tiny_gpt2, word_list
from support.engines.paged_steps import paged_steps
from support.engines.t5_requests import ask as ask_t5
from support.engines.t5_requests import settings_of, sources
from support.shards.family_shards import write_family
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.shards.random_t5 import random_t5

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.metrics import EngineMetrics, Histogram
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.scheduling.waiting import QueueLimits
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

NEVER = 4000
VALUES = [name for name, value in vars(EngineMetrics(8)).items() if isinstance(value, Histogram)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return tiny_gpt2(tmp_path_factory.mktemp("gpt2"))[1]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """A model whose rows may have several pages."""
    shards = write_shards(random_gpt2(n_positions=256), tmp_path_factory.mktemp("long"))
    return Settings(shards, 1, 1, "fp32", cpu_threads=1)


@pytest.fixture
def steps(settings: Settings) -> Steps:
    return paged_steps(settings)


class Clock:
    """Seconds that only a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def watched(clock: Callable[[], float] | None = None) -> EngineMetrics:
    """Metrics that keep every value."""
    metrics = EngineMetrics(48, clock) if clock else EngineMetrics(48)
    for name in VALUES:
        getattr(metrics, name).recent = deque()
    return metrics


def values(metrics: EngineMetrics) -> dict[str, list[float]]:
    return {name: list(getattr(metrics, name).recent) for name in VALUES}


class Client:
    """One request and its answers."""

    def __init__(self, scheduler: Scheduler, steps: Steps, tensors: Tensors, clock: Clock | None = None) -> None:
        self.answers: list[Answer] = []
        self.is_cancelled = False
        self.job = Job(parse_request(tensors, steps.config), self.answers.append, False, lambda: self.is_cancelled)
        if clock:
            self.job.submitted_s = clock()
        scheduler.add(self.job)
        self.sequences = self.job.sequences  # which it has until it is answered

    @property
    def tensors(self) -> Tensors:
        assert not isinstance(self.answers[-1], Failure), self.answers[-1]
        return self.answers[-1].tensors


def run(scheduler: Scheduler) -> None:
    while not scheduler.is_idle:
        scheduler.step()


def test_every_time_is_measured_from_where_it_should_be(steps: Steps) -> None:
    """Two requests in a batch for one: a step takes a second, a prefill a quarter of one more."""
    clock = Clock()
    metrics = watched(clock)
    scheduler = Scheduler(steps, 1, steps_ahead=False, metrics=metrics)
    prefill = scheduler._batch.prefill

    def slow_prefill(new: list[Any]) -> Any:
        clock.now += 0.25
        return prefill(new)

    scheduler._batch.prefill = slow_prefill  # type: ignore[method-assign]
    Client(scheduler, steps, ask(prompts(4), 3, end_id=NEVER), clock)
    Client(scheduler, steps, ask(prompts(6), 2, end_id=NEVER), clock)
    assert (metrics.running, metrics.waiting) == (0, 2)
    loads = []
    while not scheduler.is_idle:
        clock.now += 1
        scheduler.step()
        loads.append((metrics.running, metrics.waiting))
    assert loads == [(1, 1), (1, 1), (0, 1), (1, 0), (0, 0)]
    assert values(metrics) == {
        "iteration_tokens": [4 + 1, 1, 1, 6 + 1, 1],
        "time_to_first_token": [1.25, 4.5],
        "inter_token_latency": [1, 1, 1],
        "time_per_output_token": [1, 1],
        "e2e_latency": [3.25, 5.5],
        "queue_time": [1, 4.25],
        "prefill_time": [0.25, 0.25],
        "decode_time": [2, 1],
        "request_prompt_tokens": [4, 6],
        "request_generation_tokens": [3, 2],
    }
    assert (metrics.prompt_tokens, metrics.generation_tokens, metrics.finished["length"]) == (10, 5, 2)
    assert metrics.changed.is_set() and metrics.kv_cache_usage == 0


def test_rows_that_decode_together_wait_for_each_others_prefill_and_each_says_so(steps: Steps) -> None:
    clock = Clock()
    metrics = watched(clock)
    scheduler = Scheduler(steps, 4, steps_ahead=False, metrics=metrics)
    Client(scheduler, steps, ask(prompts(4, 5), [5, 3], end_id=NEVER), clock)
    for seconds in (1, 0.5, 2):
        if seconds == 2:
            Client(scheduler, steps, ask(prompts(9), 2, end_id=NEVER), clock)
        clock.now += seconds
        scheduler.step()
    run(scheduler)  # the clock stands still
    assert values(metrics)["inter_token_latency"] == [0.5, 0.5, 2, 2, 0, 0, 0]
    assert values(metrics)["time_to_first_token"] == [1, 1, 2]
    assert values(metrics)["iteration_tokens"] == [4 + 5 + 2, 2, 2 + 9 + 1, 2, 1]


@pytest.mark.parametrize(("pages", "steps_ahead"), [(200, False), (12, True)])
def test_totals_are_those_of_the_answers_whatever_is_asked_for(long: Settings, pages: int, steps_ahead: bool) -> None:
    steps = paged_steps(long, pages=pages)
    metrics = watched()
    scheduler = Scheduler(steps, 8, steps_ahead=steps_ahead, metrics=metrics)
    generator, clients = np.random.default_rng(3), list[tuple[int, Client]]()
    kinds: list[dict[str, Any]] = [
        {"end_id": NEVER},
        {"end_id": NEVER, "beam_width": 3},
        {"runtime_top_k": 9, "stop_words_list": word_list([[5], [17], [40], [3], [8]])},
        {"end_id": NEVER, "is_return_log_probs": True},
    ]
    for index in range(16):
        length, count = generator.integers(8, 14), int(generator.integers(90, 120))
        tensors = ask(prompts(length, seed=index), count, random_seed=index, **kinds[index % 4])
        clients.append((int(length), Client(scheduler, steps, tensors)))
        if index % 4 == 3:
            scheduler.step()
    run(scheduler)
    found = values(metrics)
    made = [len(generated(client.tensors)) * client.job.request.beam_width for _, client in clients]
    assert (metrics.preemptions > 0) == (pages == 12)
    assert metrics.generation_tokens == sum(made) == sum(found["request_generation_tokens"])
    assert sorted(found["request_generation_tokens"]) == sorted(made)
    assert metrics.prompt_tokens == sum(length for length, _ in clients)
    assert sum(found["iteration_tokens"]) == metrics.prompt_tokens + metrics.generation_tokens
    stopped = sum(client.sequences[0].beams[0].has_ended for _, client in clients)
    assert metrics.finished == {"stop": stopped, "length": 16 - stopped, "abort": 0, "error": 0} and stopped
    assert len(found["time_to_first_token"]) == len(found["e2e_latency"]) == 16
    assert len(found["inter_token_latency"]) == sum(client.sequences[0].count - 1 for _, client in clients)
    assert sum(found["decode_time"]) == pytest.approx(sum(found["inter_token_latency"]))
    parts = sum(map(sum, (found[name] for name in ("queue_time", "prefill_time", "decode_time"))))
    assert 0 <= sum(found["e2e_latency"]) - parts < 0.05 * 16
    assert (metrics.running, metrics.waiting, metrics.kv_cache_usage) == (0, 0, 0)
    assert (metrics.prefix_queries, metrics.prefix_hits) == (
        steps.cache.allocator.prefixes.queried,
        steps.cache.allocator.prefixes.found,
    )


def test_what_was_given_up_counts_by_its_reason_and_what_was_refused_does_not(steps: Steps) -> None:
    now = [0.0]
    metrics = watched()
    limits = QueueLimits(requests=2, wait_s=5.0, clock=lambda: now[0])
    scheduler = Scheduler(steps, 1, limits=limits, metrics=metrics)
    running = Client(scheduler, steps, ask(prompts(4), 30, end_id=NEVER))
    scheduler.step()
    scheduler.step()
    usage = metrics.kv_cache_usage
    assert usage == 1 / steps.cache.allocator.count
    Client(scheduler, steps, ask(prompts(4, 5), 30, end_id=NEVER))  # will have waited for too long
    waiting = Client(scheduler, steps, ask(prompts(4), 30, end_id=NEVER))
    full = Client(scheduler, steps, ask(prompts(4), 30, end_id=NEVER))
    assert full.answers[-1].code == "UNAVAILABLE" and metrics.finished["abort"] == 0
    waiting.is_cancelled = running.is_cancelled = True
    now[0] = 6
    scheduler.step()
    assert scheduler.is_idle and metrics.finished == {"stop": 0, "length": 0, "abort": 4, "error": 0}
    assert metrics.generation_tokens == 2 and metrics.prompt_tokens == 4 and not values(metrics)["e2e_latency"]


def test_a_step_that_fails_costs_no_token_twice_and_its_request_is_an_error(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = watched()
    scheduler = Scheduler(steps, 4, metrics=metrics)
    good, bad = (Client(scheduler, steps, ask(prompts(length), 6, end_id=NEVER)) for length in (4, 7))
    scheduler.step()
    decode = steps.network.decode

    def fail(*given: Any) -> Any:
        if bad.sequences[0].slots and bad.job in {each.job for each in scheduler._batch}:
            raise RuntimeError("out of memory")
        return decode(*given)

    monkeypatch.setattr(steps.network, "decode", fail)
    run(scheduler)
    assert good.tensors and bad.answers[-1].code == "INTERNAL"
    assert metrics.finished == {"stop": 0, "length": 1, "abort": 0, "error": 1}
    assert metrics.generation_tokens == 6 + 1 and metrics.prompt_tokens == 4 + 7
    assert len(values(metrics)["time_to_first_token"]) == 2


def test_a_request_without_tokens_has_no_first_token(steps: Steps) -> None:
    metrics = watched()
    scheduler = Scheduler(steps, 4, metrics=metrics)
    client = Client(scheduler, steps, ask(prompts(9), 0, is_return_context_log_probs=True))
    run(scheduler)
    found = values(metrics)
    assert client.tensors and len(found["e2e_latency"]) == 1 and metrics.finished["length"] == 1
    assert not found["time_to_first_token"] and not found["time_per_output_token"]
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (9, 0) and found["iteration_tokens"] == [9]


def test_each_request_of_a_session_counts_its_own_tokens(steps: Steps) -> None:
    metrics = watched()
    scheduler = Scheduler(steps, 4, metrics=metrics)
    for turn, length in enumerate((7, 3)):
        answers: list[Answer] = []
        tensors = ask(prompts(length), 5, end_id=NEVER) | {"START": np.array([turn == 0], np.int32)}
        scheduler.add(Job(parse_request(tensors, steps.config), answers.append, session="talk"))
        run(scheduler)
        assert not isinstance(answers[-1], Failure), answers[-1]
        assert metrics.kv_cache_usage == 1 / steps.cache.allocator.count  # what is saved of the session
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (10, 10)
    assert values(metrics)["request_prompt_tokens"] == [7, 3]


@pytest.mark.parametrize("has_decoder", [True, False])
def test_an_encoders_input_is_the_prompt(tmp_path: Path, has_decoder: bool) -> None:
    settings = settings_of(write_family(random_t5(), tmp_path, 1))
    if not has_decoder:
        settings = replace(settings, model_type="T5-Encoder")
    engine = open_engine(settings, CPU)
    tensors = ask_t5(sources(9, 4), 6, end_id=NEVER)
    if not has_decoder:
        tensors = {name: tensors[name] for name in ("input_ids", "sequence_length")}
    (outputs,) = engine.generate([engine.parse(tensors)])
    engine.close()
    made = int(outputs["sequence_length"].sum()) if has_decoder else 0
    metrics = engine.metrics
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (13, made) and made == (12 if has_decoder else 0)
    assert sum(metrics.time_to_first_token.counts) == (2 if has_decoder else 0)
    assert sum(metrics.e2e_latency.counts) == metrics.finished["length"] == 2
    assert metrics.iteration_tokens.total == 13 + made


def test_a_histogram_counts_by_the_first_bound_that_is_not_below() -> None:
    histogram = Histogram((1, 5, 10))
    for value, times in ((0, 1), (1, 2), (1.5, 1), (10, 3), (11, 1)):
        histogram.observe(value, times)
    assert histogram.counts == [3, 1, 3, 1] and histogram.total == 0 + 2 + 1.5 + 30 + 11


def test_lengths_are_counted_up_to_what_the_model_can_have() -> None:
    assert EngineMetrics(130).request_prompt_tokens.bounds == (1, 2, 5, 10, 20, 50, 100)
    assert EngineMetrics(5).request_generation_tokens.bounds == (1, 2, 5)
