"""Generate load and cut the stream of answers into repeats.

The load does not pause between warm-up and the last repeat. Requests in flight when the last repeat ends are waited for
and not counted.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, takewhile
from typing import Protocol

from evaluation.speed.tables.formulas import NANOSECONDS_PER_S
from evaluation.speed.tables.record import RequestRecord, Window
from evaluation.speed.transport.wire import Encoded


class Asks(Protocol):
    """Sends single requests, as ``Wire`` does."""

    async def ask(self, request: Encoded, scheduled_ns: int) -> RequestRecord:
        """Send a request and wait until it has ended."""


@dataclass(frozen=True)
class ClosedLoop:
    """A constant number of requests or conversations is in flight; each answer triggers the next request.

    Attributes:
        ramp_s: seconds in which the slots start, evenly spread.
    """

    concurrency: int
    ramp_s: float = 0.0


@dataclass(frozen=True)
class OpenLoop:
    """Requests are sent at given times, however fast the server answers.

    Attributes:
        arrivals_ns: due times of the requests, or of conversations' first requests, in nanoseconds after the start.
        max_in_flight: largest number of requests or conversations in flight; further ones wait in the client.
        ramp_s: seconds in which the rate of arrivals grows.
    """

    arrivals_ns: Iterator[int]
    max_in_flight: int
    ramp_s: float = 0.0


@dataclass(frozen=True)
class MeasuringPlan:
    """How long a point is measured.

    Attributes:
        warmup: minimum number of answers before the first repeat, with those of the ramp.
        requests: number of answers in a repeat.
        repeats: maximum number of repeats.
        max_s: seconds after which the point ends with the repeats that it has.
        is_enough: returns whether the repeats so far agree.
    """

    warmup: int
    requests: int
    repeats: int
    max_s: float
    is_enough: Callable[[Sequence[Window]], bool]


class Recorder:
    """Collects answers in the order of their arrival and divides them into windows.

    Attributes:
        windows: finished repeats.
        warmups: answers before the first repeat.
        is_over: whether no further request may be sent.
        is_measuring: whether the first repeat has begun.
        in_flight: requests or conversations that were due, have been taken from the load, and have not ended.
        sent: number of all requests that were sent, counted or not.
        taken: requests that were due and have been taken from an open loop; None in a closed one.
        count_waiting: counts those that are due at a time of the clock and have not been taken yet.
    """

    def __init__(self, plan: MeasuringPlan, ramp_s: float) -> None:
        self.plan = plan
        self.windows: list[Window] = []
        self.warmups: list[RequestRecord] = []
        self.is_over = False
        self.in_flight = 0
        self.sent = 0
        self.taken: int | None = None
        self.count_waiting: Callable[[int], int] = lambda now_ns: 0
        self._current: list[RequestRecord] = []
        self._begin_ns = time.perf_counter_ns()
        self._ramp_end_ns = self._begin_ns + round(ramp_s * NANOSECONDS_PER_S)
        self._window_ns = self._begin_ns
        self._arrived_before = 0
        self.is_measuring = plan.warmup == 0 and ramp_s == 0

    def add(self, record: RequestRecord) -> None:
        """Add one answer."""
        if self.is_over:
            return
        if not self.is_measuring:
            self.warmups.append(record)
            if len(self.warmups) >= self.plan.warmup and record.done_ns >= self._ramp_end_ns:
                self._window_ns = record.done_ns
                self._count_arrivals(record.done_ns)
                self.is_measuring = True
        else:
            self._current.append(record)
        is_late = record.done_ns - self._begin_ns > self.plan.max_s * NANOSECONDS_PER_S
        if len(self._current) >= self.plan.requests or (is_late and self._current):
            self._close(record.done_ns)
        self.is_over = self.is_over or is_late

    def _close(self, now_ns: int) -> None:
        backlog = self.in_flight + self.count_waiting(now_ns)
        window = Window(tuple(self._current), self._window_ns, now_ns, backlog, self._count_arrivals(now_ns))
        self.windows.append(window)
        self._current, self._window_ns = [], now_ns
        is_hopeless = not window.succeeded
        is_last = len(self.windows) >= self.plan.repeats
        self.is_over = is_hopeless or is_last or self.plan.is_enough(self.windows)

    def _count_arrivals(self, now_ns: int) -> int | None:
        """Count the requests that have become due since the last call; None in a closed loop."""
        if self.taken is None:
            return None
        arrived = self.taken + self.count_waiting(now_ns)
        new, self._arrived_before = arrived - self._arrived_before, arrived
        return new


class Arrivals:
    """Due times of an open loop, taken one after another; those that have passed are counted before they are taken.

    Args:
        due_ns: nanoseconds after the start, ascending.
        begin_ns: start of the load by the clock.
    """

    def __init__(self, due_ns: Iterator[int], begin_ns: int) -> None:
        self._due_ns, self._begin_ns = due_ns, begin_ns
        self._drawn: deque[int] = deque()

    def __iter__(self) -> Iterator[int]:
        """Yield due times by the clock."""
        while self._drawn or self._draw():
            yield self._drawn.popleft()

    def count_due(self, now_ns: int) -> int:
        """Count the due times up to now that have not been taken."""
        while (not self._drawn or self._drawn[-1] <= now_ns) and self._draw():
            pass
        return sum(due_ns <= now_ns for due_ns in self._drawn)

    def _draw(self) -> bool:
        for due_ns in self._due_ns:
            self._drawn.append(self._begin_ns + due_ns)
            return True
        return False


async def drive(wire: Asks, requests: Sequence[Encoded], load: ClosedLoop | OpenLoop, plan: MeasuringPlan) -> Recorder:
    """Put the server under load until the plan is fulfilled.

    Args:
        wire: sends requests.
        requests: sent in this order, and again from the first when they run out.
        load: closed or open loop.
        plan: how long.
    """
    with _without_garbage_collection():
        recorder = Recorder(plan, load.ramp_s)
        given = takewhile(lambda _: not recorder.is_over, cycle(requests))
        if isinstance(load, ClosedLoop):
            await _closed(wire, load, given, recorder)
        else:
            await _open(wire, load, given, recorder)
    return recorder


async def _closed(wire: Asks, load: ClosedLoop, given: Iterator[Encoded], recorder: Recorder) -> None:
    async def slot(number: int) -> None:
        if load.ramp_s:
            await asyncio.sleep(load.ramp_s * number / load.concurrency)
        free_ns = time.perf_counter_ns()
        for request in given:
            recorder.in_flight += 1
            record = await _converse(wire, request, free_ns, recorder)
            free_ns = record.done_ns
            if record.error:
                await asyncio.sleep(0)  # a request that fails at once must not starve the other slots

    await asyncio.gather(*(slot(number) for number in range(load.concurrency)))


async def _converse(
    wire: Asks, request: Encoded, due_ns: int, recorder: Recorder, free_ns: int | None = None
) -> RequestRecord:
    """Send a request and what follows it in its conversation, each after the answer before; return the last record.

    Args:
        wire: sends requests.
        request: the first one.
        due_ns: when it was due or, in a closed loop, when its slot became free.
        recorder: gets the answers.
        free_ns: when there was room in flight for it, of an open loop; None in a closed one.
    """
    while True:
        recorder.sent += 1
        record = await wire.ask(request, due_ns)
        if free_ns is not None:
            lag_ns = max(0, record.sent_ns - max(due_ns, free_ns))
            record = dataclasses.replace(record, is_of_schedule=True, lag_ns=lag_ns)
        following = request.follow_up if record.is_complete else None
        if following is None:
            recorder.in_flight -= 1
        recorder.add(record)
        if following is None or recorder.is_over:
            return record
        think_s = following.prompt.think_s
        if think_s:
            await asyncio.sleep(think_s)
        request, due_ns = following, record.done_ns + round(think_s * NANOSECONDS_PER_S)
        if recorder.taken is not None:
            recorder.taken += 1


async def _open(wire: Asks, load: OpenLoop, given: Iterator[Encoded], recorder: Recorder) -> None:
    room = asyncio.Semaphore(load.max_in_flight)
    tasks: set[asyncio.Task[None]] = set()

    async def one(request: Encoded, due_ns: int, free_ns: int) -> None:
        try:
            await _converse(wire, request, due_ns, recorder, free_ns)
        finally:
            room.release()

    arrivals = Arrivals(load.arrivals_ns, time.perf_counter_ns())
    recorder.count_waiting, recorder.taken, free_ns = arrivals.count_due, 0, 0
    for due_ns, request in zip(arrivals, given, strict=False):
        wait_ns = due_ns - time.perf_counter_ns()
        if wait_ns > 0:
            await asyncio.sleep(wait_ns / NANOSECONDS_PER_S)
        recorder.in_flight += 1
        recorder.taken += 1
        if room.locked():
            await room.acquire()
            free_ns = time.perf_counter_ns()
        else:
            await room.acquire()
        if recorder.is_over:
            break
        task = asyncio.create_task(one(request, due_ns, free_ns))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector, which would stop the client for milliseconds during a measurement."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
