"""The router's process: started, watched, started again with the replicas that it had."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from deployment.engines.process import EngineServer, environment_of
from deployment.processes.restarts import MOST_RESTARTS, Restarts
from deployment.processes.supervised import ServerDiedError
from deployment.replicas.replica import Replica
from deployment.replicas.router import Router
from handover.errors import ServerError

_PATIENCE_S = 60.0
_PAUSE_S = 0.05
_SILENT_S = 30.0
_EVERY_S = 1.0
"""A look reads every process of the host."""


class RouterProcess:
    """A router that runs.

    Args:
        router: to start.
        directory: private one of the deployment, in which its session is noted.
        log: of what it prints.
        is_stopped: waits for that many seconds; returns whether the deployment is to stop.
    """

    def __init__(self, router: Router, directory: Path, log: Path, is_stopped: Callable[[float], bool]) -> None:
        self._router, self._directory, self._log, self._is_stopped = router, directory, log, is_stopped
        self._restarts = Restarts()
        self._admitted = set[int]()
        self._silent_since: float | None = None
        self._looked = 0.0
        self._start(False)

    def _start(self, is_again: bool) -> None:
        argv, environment = self._router.argv(), environment_of(self._directory)
        self._process = EngineServer(
            self._router.title,
            argv,
            environment,
            self._directory,
            self._log,
            is_again,
            "name it in deployment.router_command",
        )
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_stopped(_PAUSE_S) and not self._router.is_up():
            self._process.check()
            if time.monotonic() > deadline:
                raise self._process.explain(f"{self._router.title} does not listen")

    def watch(self) -> str:
        """Look once a second, and start it again if it has died; the replicas go on.

        Returns:
            What happened, for the operator; empty: it runs.

        Raises:
            ServerDiedError: it has died too often.
        """
        if time.monotonic() - self._looked < _EVERY_S:
            return ""
        self._looked = time.monotonic()
        try:
            self._process.check()
            return ""
        except ServerDiedError as error:
            number = self._restarts.take()
            if number is None:
                raise
            self._process.stop(None)
            self._admitted.clear()
            self._start(True)
            what = error.problem.splitlines()[0]
            return f"{what}; started again, {number} of {MOST_RESTARTS} within ten minutes"

    def follow(self, replica: Replica, is_wanted: bool) -> bool:
        """Open or close a replica to requests; return whether that is new.

        Raises:
            ServerError: the router has not taken such a word for 30 s.
        """
        number = replica.number
        if is_wanted == (number in self._admitted):
            return False
        try:
            if is_wanted:
                self._router.admit(number, replica.endpoint())
                self._admitted.add(number)
            else:
                self._router.withdraw(number)
                self._admitted.discard(number)
        except ServerError:  # it has died, or the replica has just gone: the next look tells
            self._silent_since = self._silent_since or time.monotonic()
            if time.monotonic() - self._silent_since > _SILENT_S:
                raise
            return False
        self._silent_since = None
        return True

    def sent_bytes(self, replica: Replica) -> int | None:
        """Count what has come back from a replica; None: unknown."""
        try:
            return self._router.sent_bytes(replica.number)
        except ServerError:
            return None

    def stop(self) -> None:
        """End it."""
        self._process.stop(None)
