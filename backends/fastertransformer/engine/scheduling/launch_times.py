"""When a GPU's next step is launched: late, so that arriving requests join it, but before the last one ends.

A step ahead (see scheduler.py) need not be launched until just before the GPU is done with the one before it. Launched
at once, it would leave out every request that arrives meanwhile: it would wait for the rest of one step and for another
one. So the host learns how long the steps of each size take, and how long it takes itself to launch one, and waits for
arrivals in between.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from .tuning import TUNING


class LaunchTimes:
    """Learns how long the next launch may wait.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[tuple[int, int], float] = {}  # that the last step of a size took on the GPU
        self._leads_s = [0.0, 0.0]  # that the host takes to launch a step: without and with contexts
        self._launched: deque[tuple[tuple[int, int], float]] = deque()  # size and moment of the steps not read yet
        self._begun_s = self._read_s = 0.0
        self._has_waited = False

    def begin(self, is_idle: bool) -> None:
        """Note that the host begins a step; ``is_idle``: the GPU has ended all that was launched before."""
        self._begun_s = self._clock()
        if is_idle and self._has_waited and self._launched:
            self._leads_s = [lead_s + TUNING.slack_s for lead_s in self._leads_s]

    def launch(self, rows: int, tokens: int, is_first: bool) -> None:
        """Note that a step was launched.

        Args:
            rows: that decode.
            tokens: of contexts.
            is_first: whether no other step is under way.
        """
        if is_first:
            self._launched.clear()
        now, has_contexts = self._clock(), tokens > 0
        self._leads_s[has_contexts] = max(now - self._begun_s, TUNING.lead_decay * self._leads_s[has_contexts])
        self._launched.append(((-(-rows // TUNING.rows_of_size), -(-tokens // TUNING.tokens_of_size)), now))

    def read(self, was_awaited: bool) -> None:
        """Note that the tokens of the oldest step were read; ``was_awaited``: the host waited for them until now."""
        now, (size, launched_s) = self._clock(), self._launched.popleft()
        seconds = now - max(launched_s, self._read_s)  # the most that it can have taken, if it had ended before
        self._seconds[size] = seconds if was_awaited else min(seconds, self._seconds.get(size, 0.0))
        self._read_s = now

    def spare_s(self, has_waiting: bool) -> float:
        """Return the seconds that the next launch can be delayed without idling the GPU.

        Args:
            has_waiting: whether sequences wait to join; with them a launch takes longer.
        """
        spare_s = 0.0
        if self._launched:
            size, launched_s = self._launched[-1]
            end_s = max(launched_s, self._read_s) + (1 - TUNING.slack_share) * self._seconds.get(size, 0.0)
            spare_s = max(0.0, end_s - self._leads_s[has_waiting] - TUNING.slack_s - self._clock())
        self._has_waited = spare_s > 0
        return spare_s
