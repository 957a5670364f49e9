"""How many requests may wait, and for how long. Others are refused, so that their clients can go elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..rows.sequence import Job


@dataclass(frozen=True)
class QueueLimits:
    """The limits of the queue. A request that has been in the batch is not subject to them.

    Attributes:
        requests: that wait at most; 0: any number.
        wait_s: seconds that a request waits at most; 0: any time.
        clock: gives the seconds.
    """

    requests: int = 0
    wait_s: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def problem_at_arrival(self, job: Job, waiting: Callable[[], Sequence[Job]]) -> str:
        """Return why a request is refused, given those that wait; empty: it may wait too, from now on."""
        if job.arrived_s is None:
            if self.requests and (queued := sum(not each.has_begun for each in waiting())) >= self.requests:
                return (
                    f"{queued} requests wait already, and max_queue_length is {self.requests}: send it again later, or"
                    " to another server"
                )
            job.arrived_s = self.clock()
        return ""

    def find_late(self, waiting: Callable[[], Sequence[Job]]) -> Iterator[tuple[Job, str]]:
        """Find the requests that have waited for too long, each with what its client is told."""
        if not self.wait_s:
            return
        now = self.clock()
        for job in waiting():
            if not job.has_begun and job.arrived_s is not None and now - job.arrived_s > self.wait_s:
                waited = f"it has waited for {now - job.arrived_s:.3g} s, and max_queue_s is {self.wait_s:g}"
                yield job, f"{waited}: send it again later, or to another server"


NO_LIMITS = QueueLimits()
