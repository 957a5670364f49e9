"""Requests that come together are taken together, are read between steps by the engine's thread, and delay nothing."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.engines.asking import CPU, ask, generated, prompts
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from support.tiny_models.greedy import NEVER, greedy
from transformers import GPT2LMHeadModel

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.arrivals import Arrivals, Unparsed
from backends.fastertransformer.engine.settings import Settings


class Sessions:
    """None is open, so that an idle scheduler waits for as long as it takes."""

    idle_timeout_s = None

    def expire(self) -> None:
        pass


class Scheduled:
    """What a scheduler is asked, and the requests that it got; ``spare_s``: for which a GPU is still busy."""

    def __init__(self, decoding: int = 0, spare_s: float = 0.0) -> None:
        self.jobs: list[Any] = []
        self.is_decoding, self.spare_s, self.sessions = bool(decoding), spare_s, Sessions()

    @property
    def is_idle(self) -> bool:
        return not (self.jobs or self.is_decoding)

    def add(self, job: Any) -> None:
        self.jobs.append(job)

    def note_load(self) -> None:
        pass


class TimedQueue:
    """A queue to which requests come at given moments of a clock that moves with those who wait for them."""

    def __init__(self, moments: list[float]) -> None:
        self.now, self._coming = 0.0, [(each, new_job()) for each in sorted(moments)]

    def get_nowait(self) -> Any:
        return self.get(timeout=0.0)

    def get(self, timeout: float | None) -> Any:
        moment, arrival = self._coming[0] if self._coming else (float("inf"), None)
        if timeout is not None and moment > self.now + timeout:
            self.now += timeout
            raise queue.Empty
        self.now = max(self.now, moment)
        self._coming.pop(0)
        return arrival


def new_job() -> Job:
    return Job.__new__(Job)


def take(moments: list[float], scheduler: Scheduled) -> tuple[int, float]:
    """How many requests the next step has, and when it begins."""
    timed = TimedQueue(moments)
    arrivals = Arrivals(lambda: timed.now)
    arrivals._queue = timed  # type: ignore[assignment]
    arrivals.take(scheduler)  # type: ignore[arg-type]
    return len(scheduler.jobs), timed.now


def every(step_ms: float, count: int) -> list[float]:
    return [number * step_ms / 1000 for number in range(count)]


@pytest.mark.parametrize(
    "moments, decoding, count, waited_ms",
    [
        ([0.0], 0, 1, 0),  # one that is alone does not wait
        (every(0.2, 10), 0, 1, 0),  # nor does the first one of a burst
        ([0.0, *every(0, 2)], 0, 3, 0.6),  # three that are there, and 0.6 ms of quiet behind them
        ([0.0, *every(0.2, 10)], 0, 11, 1.8 + 0.6),
        ([0.0, *every(0.5, 100)], 0, 18, 8),  # a burst is cut after 8 ms
        ([0.0, *every(0.7, 10)], 0, 2, 0.6),  # too far apart for a burst
        ([0.0, *every(0.2, 100)], 1, 12, 2),  # and after 2 ms, where rows decode
    ],
)
def test_a_step_waits_for_a_burst(moments: list[float], decoding: int, count: int, waited_ms: float) -> None:
    found, now = take(moments, Scheduled(decoding))
    assert found == count
    assert now * 1000 == pytest.approx(waited_ms)


def test_rows_that_decode_do_not_wait_for_requests() -> None:
    assert take([0.0001], Scheduled(decoding=1)) == (0, 0.0)


def test_a_busy_gpu_lets_time_for_what_comes() -> None:
    class Busy(Scheduled):
        def add(self, job: Any) -> None:
            super().add(job)
            self.spare_s = 0.0

    assert take([0.004], Busy(decoding=1, spare_s=0.005)) == (1, 0.004)


def test_calls_that_take_long_are_made_in_several_steps() -> None:
    arrivals, scheduler = Arrivals(), Scheduled(decoding=1)
    made: list[int] = []

    def call(number: int) -> Callable[[], None]:
        def submit() -> None:
            time.sleep(0.005)
            made.append(number)
            arrivals.put(new_job())

        return submit

    arrivals.announce(Unparsed([call(number) for number in range(7)]))
    arrivals.put(new_job())
    arrivals.take(scheduler)  # type: ignore[arg-type]
    assert 0 < len(made) < 7 and len(scheduler.jobs) == len(made) + 1  # those behind them are not held up
    for _ in range(7):
        arrivals.take(scheduler)  # type: ignore[arg-type]
    assert made == list(range(7)) and len(scheduler.jobs) == 8


def test_sources_that_keep_coming_let_the_steps_go_on() -> None:
    arrivals, scheduler = Arrivals(), Scheduled(decoding=1)
    made: list[float] = []

    def submit() -> None:
        time.sleep(0.003)
        made.append(time.monotonic())
        if len(made) < 50:
            arrivals.announce(Unparsed([submit]))  # another one comes before this one is done

    arrivals.announce(Unparsed([submit]))
    arrivals.take(scheduler)  # type: ignore[arg-type]
    assert 0 < (first := len(made)) < 50
    arrivals.take(scheduler)  # type: ignore[arg-type]
    assert len(made) > first  # and none is forgotten


def test_while_a_gpu_is_busy_for_long_sources_are_still_read() -> None:
    class Busy(Scheduled):
        """Its GPU is busy until two requests have come."""

        def add(self, job: Any) -> None:
            super().add(job)
            self.spare_s = 10.0 if len(self.jobs) < 2 else 0.0

    arrivals, scheduler = Arrivals(), Busy(decoding=1, spare_s=10.0)
    come = Unparsed([lambda: arrivals.put(new_job()), lambda: arrivals.put(new_job())])
    threading.Timer(0.05, arrivals.announce, [come]).start()  # long behind the 8 ms of a GPU that is not busy
    arrivals.take(scheduler)  # type: ignore[arg-type]
    assert len(scheduler.jobs) == 2


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    return random_gpt2(n_positions=256)


@pytest.fixture
def engine(model: GPT2LMHeadModel, tmp_path: Any) -> Iterator[Engine]:
    opened = open_engine(Settings(write_shards(model, tmp_path), 1, 1, "fp32", cpu_threads=1), CPU)
    yield opened
    opened.close()


def test_requests_are_parsed_between_the_steps_of_the_engine(engine: Engine, model: GPT2LMHeadModel) -> None:
    """While a step runs, no other thread parses: the calls are made by the engine's, and every answer is right."""
    lines = prompts(9, 7, 5, 11)
    is_stepping, overlaps, threads = [False], list[bool](), set[str]()
    step = engine._scheduler.step

    def stepped() -> None:
        is_stepping[0] = True
        step()
        is_stepping[0] = False

    engine._scheduler.step = stepped  # type: ignore[method-assign]
    answers: dict[int, Answer] = {}
    is_done = threading.Event()

    def call(number: int) -> Callable[[], None]:
        def keep(answer: Answer) -> None:
            answers[number] = answer
            if len(answers) == len(lines):
                is_done.set()

        def submit() -> None:
            overlaps.append(is_stepping[0])
            threads.add(threading.current_thread().name)
            engine.submit(engine.parse(ask([lines[number]], 6, end_id=NEVER)), keep)

        return submit

    for number in range(len(lines)):
        engine.announce(Unparsed([call(number)]))
        time.sleep(0.002)
    assert is_done.wait(240)
    assert threads == {"engine"} and not any(overlaps)
    for number, line in enumerate(lines):
        tensors = answers[number].tensors
        assert tensors and generated(tensors) == greedy(model, line, 6)[len(line) :]


def test_a_closed_engine_answers_what_was_parsed_and_drops_the_rest() -> None:
    arrivals, job = Arrivals(), new_job()
    arrivals.announce(Unparsed([lambda: None]))
    arrivals.put(job)
    arrivals.wake()
    assert arrivals.drain() == [job] and arrivals.drain() == []
