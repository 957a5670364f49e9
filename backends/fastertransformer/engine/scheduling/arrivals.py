"""Requests on their way from other threads to the scheduler, which takes them between two steps.

A burst is answered soonest in few passes of many contexts, so the engine waits a little while requests keep coming. The
requests of a Source are read and parsed by the engine's thread itself, between its steps: torch lets go of Python's
lock at every operation, so a step of a few rows takes ten times as long while another thread parses requests.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from ..rows.sequence import Job
from .tuning import TUNING

if TYPE_CHECKING:
    from .scheduler import Scheduler


class Source(Protocol):
    """Where requests wait that were not read yet."""

    def pull(self, until_s: float) -> bool:
        """Submit the requests that wait; the engine's thread calls it.

        Args:
            until_s: of time.monotonic, after which no further one is read.

        Returns:
            Whether none is left; else this is called again after a step, without being announced.
        """


class Unparsed:
    """A source of requests that are there, and are still to be parsed.

    Args:
        calls: each parses one and submits it, and raises nothing.
    """

    def __init__(self, calls: Iterable[Callable[[], None]]) -> None:
        self._calls = deque(calls)

    def pull(self, until_s: float) -> bool:
        """Make the calls; see Source."""
        while self._calls:
            self._calls.popleft()()
            if time.monotonic() > until_s:
                break
        return not self._calls


class Arrivals:
    """Requests that the scheduler does not have yet; any thread may add some.

    Args:
        clock: gives seconds; ``until_s`` of a Source is of it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue: queue.SimpleQueue[Job | Source | None] = queue.SimpleQueue()

    def put(self, job: Job) -> None:
        """Add a request."""
        self._queue.put(job)

    def announce(self, source: Source) -> None:
        """Note that requests wait there, which happens again only after they were pulled."""
        self._queue.put(source)

    def wake(self) -> None:
        """Make ``take`` return."""
        self._queue.put(None)

    def take(self, scheduler: Scheduler) -> None:
        """Pass requests on to the scheduler.

        If it is idle, this waits for one; else for more, as long as the GPU is busy or a burst keeps coming. Where the
        GPU is not busy, a source is pulled for 8 ms at most and all of them for 32; what is left waits for a step.
        """
        burst = _Burst(self._clock())
        while True:
            is_idle = scheduler.is_idle
            wait_s: float | None = scheduler.sessions.idle_timeout_s
            if not is_idle:
                wait_s = scheduler.spare_s or burst.wait_s(self._clock(), scheduler.is_decoding)
            try:
                arrival = self._queue.get_nowait() if wait_s == 0 else self._queue.get(timeout=wait_s)
            except queue.Empty:
                if not is_idle:
                    return
                scheduler.sessions.expire()
                scheduler.note_load()
                continue
            now = self._clock()
            if is_idle:
                burst = _Burst(now)
            if arrival is None:
                return
            if isinstance(arrival, Job):
                scheduler.add(arrival)
                burst.note(now)
                continue
            spare_s = scheduler.spare_s
            is_late = not spare_s and now > burst.begun_s + TUNING.max_parse_all_s
            if is_late or not arrival.pull(max(burst.begun_s + TUNING.max_parse_s, now + spare_s)):
                self._queue.put(arrival)
                self._take_parsed(scheduler)
                return

    def _take_parsed(self, scheduler: Scheduler) -> None:
        """Pass on the requests that need no reading; all else stays for the next time."""
        for _ in range(self._queue.qsize()):
            arrival = self._queue.get_nowait()
            if isinstance(arrival, Job):
                scheduler.add(arrival)
            else:
                self._queue.put(arrival)

    def drain(self) -> list[Job]:
        """Drop all that is left; returns the requests."""
        left = list[Job]()
        while not self._queue.empty():
            if isinstance(arrival := self._queue.get_nowait(), Job):
                left.append(arrival)
        return left


class _Burst:
    """Requests that come one after another.

    Args:
        begun_s: when the engine began to take them.
    """

    def __init__(self, begun_s: float) -> None:
        self.begun_s, self._last_s, self._count = begun_s, begun_s, 0

    def note(self, now: float) -> None:
        """Count one more."""
        self._last_s, self._count = now, self._count + 1

    def wait_s(self, now: float, is_decoding: bool) -> float:
        """Return the seconds to wait for the next one; 0: there is no burst, it is over, or others waited enough."""
        if self._count < 2:
            return 0.0
        end_s = self.begun_s + (TUNING.max_burst_decoding_s if is_decoding else TUNING.max_burst_s)
        return max(0.0, min(self._last_s + TUNING.max_burst_gap_s, end_s) - now)
