"""Restart every replica, one after another, while the others take its requests. Standard library only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Sequence
from enum import Enum

from deployment.replicas.replica import NotNowError, Place, Replica
from deployment.replicas.router import Router
from handover.errors import ServerError
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
        replicas: all that are to be restarted.
        given_up: numbers of those that do not come back, which may grow: it ends the restart.
        router: that passes requests on to them.
        drain_timeout_s: for the requests in flight of one.

    Attributes:
        leaving: the replica that is away for it: its end is no death.
        problem: why it ended before all were restarted; empty: it did not.
    """

    def __init__(
        self, replicas: Sequence[Replica], given_up: Collection[int], router: Router, drain_timeout_s: float
    ) -> None:
        self._replicas, self._given_up = replicas, given_up
        self._router, self._drain_timeout_s = router, drain_timeout_s
        self._left, self.problem = list(replicas), ""
        self._phase, self._since = Phase.DRAINING, 0.0
        self.leaving: Replica | None = None

    def step(self) -> bool:
        """Go on as far as that is possible at once; return whether it is over."""
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
        for replica in self._replicas:
            if replica.number in self._given_up:
                self.problem = f"replica {replica.number} was given up meanwhile; {len(self._left)} were not restarted"
                return True
        if all(replica.place is Place.SERVING for replica in self._replicas):
            self.leaving, self._phase, self._since = self._left.pop(0), Phase.DRAINING, time.monotonic()
        return False

    def _drain(self, replica: Replica, waited_s: float) -> None:
        if waited_s < _LEAST_S:
            return
        left, said = self._in_flight(replica)
        if left and waited_s < self._drain_timeout_s:
            return
        if left:
            say(f"restarting replica {replica.number}: {said} still in flight after {waited_s:.0f} s")
        with contextlib.suppress(NotNowError):
            replica.leave()
            self._phase = Phase.STOPPING

    def _in_flight(self, replica: Replica) -> tuple[int, str]:
        """Count a replica's requests, and say how many they are: at least one while there is no answer."""
        if replica.place is not Place.SERVING:
            return 0, ""
        try:
            count = self._router.in_flight(replica.number) or 0
        except ServerError:  # the router has died and is started again, or the replica is too busy to tell
            return 1, "an unknown number of requests"
        return count, f"{count} requests"
