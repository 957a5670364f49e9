"""How often a process that has died is started again before its supervisor gives up. Standard library only."""

from __future__ import annotations

import time
from collections import deque

MOST_RESTARTS = 3
_WITHIN_S = 600.0


class Restarts:
    """Counts the restarts of the last ten minutes."""

    def __init__(self) -> None:
        self._times: deque[float] = deque()

    def take(self) -> int | None:
        """Return which restart of the last ten minutes this one is; None: there were enough of them."""
        now = time.monotonic()
        while self._times and now - self._times[0] > _WITHIN_S:
            self._times.popleft()
        if len(self._times) >= MOST_RESTARTS:
            return None
        self._times.append(now)
        return len(self._times)
