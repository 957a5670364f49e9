"""Processes that stand still because somebody has stopped them (SIGSTOP). Standard library only."""

from __future__ import annotations

import time
from collections.abc import Iterable

from deployment.processes.linux import Process

STOPPED_S = 20.0
"""A process of a server that was stopped (SIGSTOP) for so long is given up; as with ranks, see the engine's Ranks."""
_LONGEST_LOOK_S = 1.0
"""Longest time between two looks that counts: the supervisor may have been stopped too, as by scontrol suspend."""


class StoppedProcesses:
    """How long each of a server's processes has been stopped."""

    def __init__(self) -> None:
        self._stopped_s: dict[int, float] = {}
        self._looked = time.monotonic()

    def find(self, processes: Iterable[Process]) -> list[int]:
        """Look once; give those that have been stopped for long. A debugger's stop is another state, and left alone."""
        now = time.monotonic()
        passed_s, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        self._stopped_s = {
            each.pid: self._stopped_s.get(each.pid, 0) + passed_s for each in processes if each.state == "T"
        }
        return [pid for pid, stopped_s in self._stopped_s.items() if stopped_s > STOPPED_S]
