"""Restart every replica, one after another, while the others take its requests. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum

from deployment.replicas.replica import Place, Replica
from deployment.replicas.router import Router
from handover.progress import say

_LEAST_S = 1.0
"""For requests that the router had given to a replica and not counted yet when it was withdrawn."""


class Phase(Enum):
    """What is being waited for."""

    DRAINING = "its requests in flight"
    STOPPING = "its end"
    STARTING = "its start"


class RollingRestart:
    """A restart under way.

    Args:
        replicas: all of them.
        router: that passes requests on to them.
        drain_timeout_s: for the requests in flight of one.

    Attributes:
        leaving: the replica that is away for it: its end is no death.
    """

    def __init__(self, replicas: Sequence[Replica], router: Router, drain_timeout_s: float) -> None:
        self._replicas, self._router, self._drain_timeout_s = replicas, router, drain_timeout_s
        self._left = list(replicas)
        self._phase, self._since = Phase.DRAINING, 0.0
        self.leaving: Replica | None = None

    def step(self) -> bool:
        """Go on as far as that is possible at once; return whether all replicas have been restarted."""
        replica = self.leaving
        if replica is None:
            return self._take_next()
        if self._phase is Phase.DRAINING:
            self._drain(replica, time.monotonic() - self._since)
        elif self._phase is Phase.STOPPING and replica.come_back():
            self._phase = Phase.STARTING
        elif self._phase is Phase.STARTING and replica.place is Place.SERVING:
            say(f"restarted  replica {replica.number}")
            self.leaving = None
        return False

    def is_taking_away(self, replica: Replica) -> bool:
        """Return whether a replica is to get no requests for now, and may end."""
        return self.leaving is replica and self._phase is not Phase.STARTING

    def _take_next(self) -> bool:
        if not self._left:
            return True
        if all(replica.place is Place.SERVING for replica in self._replicas):
            self.leaving, self._phase, self._since = self._left.pop(0), Phase.DRAINING, time.monotonic()
        return False

    def _drain(self, replica: Replica, waited_s: float) -> None:
        if waited_s < _LEAST_S:
            return
        left = self._router.in_flight(replica.number)
        if left and waited_s < self._drain_timeout_s:
            return
        if left:
            say(f"restarting replica {replica.number}: {left} requests still in flight after {waited_s:.0f} s")
        replica.leave()
        self._phase = Phase.STOPPING
