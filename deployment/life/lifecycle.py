"""The life of a deployment, whatever serves: started, proved, watched, started again if it has died, ended."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from deployment.arguments import EngineArguments, ServeArguments
from deployment.life.background_probe import BackgroundProbe
from deployment.life.leftovers import State, Sweeper, create_state, remove_files, sweep, withdraw
from deployment.life.stop_request import StopRequest
from deployment.processes.supervised import ServerDiedError, Supervised
from handover.errors import ServerError
from handover.progress import human_time, say

_POLL_S = 0.2
_STARTING_POLL_S = 0.1
_SAY_EVERY_S = 15.0


S = TypeVar("S", bound=Supervised)


@contextmanager
def leaving_nothing(endpoint: Path) -> Iterator[State]:
    """Yield the note of a deployment that begins; at its end, whatever ends it, nothing of it is left."""
    state = create_state(endpoint)
    sweeper = Sweeper(state)
    try:
        yield state
    finally:
        sweep(state)
        remove_files(endpoint, state.prefix)
        sweeper.dismiss()


class Lifecycle(ABC, Generic[S]):
    """One server at a time, and what is left of it swept away.

    Args:
        arguments: of this process.
        stop: ends the deployment.
        may_join: whether it could still join those that serve together with it if it were started again.
    """

    def __init__(
        self,
        arguments: ServeArguments | EngineArguments,
        stop: StopRequest,
        may_join: Callable[[], bool] = lambda: True,
    ) -> None:
        self._given, self._stop, self._may_join = arguments, stop, may_join
        self._is_serving = self._has_crashed = False

    def run(self) -> None:
        """Bring the server up and watch it until it is asked to stop.

        Raises:
            ServerError: the server did not start in time, or it or a stub died more often than it may be restarted.
        """
        if self._stop.came(0):
            return
        with leaving_nothing(self._given.endpoint) as state:
            self._run(state)

    @abstractmethod
    def _prepare_start(self, state: State) -> Callable[[bool], S]:
        """Lay out what the server needs; give what starts it, for the first time or again (True)."""

    @abstractmethod
    def _open(self, server: S, state: State, started: float) -> bool:
        """Prove the server and publish it; False: the deployment was asked to stop before."""

    def _look(self) -> None:
        """Look after what runs beside the server; here there is nothing."""
        return

    def _end_beside(self, exit_timeout_s: float) -> float:
        """End what runs beside the server, while that still answers; return the seconds that are left."""
        return exit_timeout_s

    def _run(self, state: State) -> None:
        start, is_again, restarts = self._prepare_start(state), False, 0
        while True:
            started = time.monotonic()
            server = start(is_again)
            is_again = True
            try:
                return self._watch(server, state, started)
            except ServerError as error:
                failure, crash = error, server.find_crash()
            finally:
                self._end(server, state)
            if self._forgives(crash):
                continue
            if not (isinstance(failure, ServerDiedError) and self._is_serving and restarts < self._given.restart):
                raise failure
            restarts += 1
            say(f"restarting {restarts} of {self._given.restart}: {failure.problem}")

    def _forgives(self, crash: str) -> bool:
        """Return whether the server that has ended crashed for the first time, before it served; tell the operator.

        Such a crash is rarely the model's fault: on busy cores Triton gives up stubs that live, see its ``Server``.
        """
        if not crash or self._is_serving or self._stop.reason or self._has_crashed or not self._may_join():
            return False
        self._has_crashed = True
        say(f"starting again: {crash} before it served")
        return True

    def _watch(self, server: S, state: State, started: float) -> None:
        if not self._open(server, state, started):
            return
        self._is_serving = True
        while not self._stop.came(_POLL_S):
            server.check()
            self._look()

    def _wait_until_it_generates(self, server: S, probe: BackgroundProbe) -> bool:
        """Wait for the probe's generation and say now and then for how long; False if asked to stop before."""
        timeout_s = self._given.start_timeout_s
        started = said = time.monotonic()
        while not self._stop.came(_STARTING_POLL_S):
            server.check()
            try:
                if probe.is_done():
                    say(f"ready      a generation came back after {time.monotonic() - started:.1f} s")
                    return True
            except ServerError as error:
                raise server.explain(error.problem) from error
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                waited, most = human_time(said - started), human_time(timeout_s)
                say(f"starting   for {waited}, at most {most} (deployment.start_timeout_s)")
            if time.monotonic() - started > timeout_s:
                raise server.explain(f"no generation came back within {timeout_s:g} s")
        return False

    def _end(self, server: S, state: State) -> None:
        """Stop the server; requests in flight are waited for where it was asked to stop, and no other time."""
        # First of all: no client shall find a server that is stopping.
        was_published = withdraw(self._given.endpoint, state.prefix)
        if self._stop.reason:
            say(f"stopping   {self._stop.reason}")
        exit_timeout_s = self._end_beside(self._given.exit_timeout_s)
        if not self._is_serving:  # there is no request to wait for, and a server that loads does not listen to SIGTERM
            server.stop(min(0, exit_timeout_s))
        elif not self._stop.reason:
            server.stop(None)
        elif word := server.word_of_crash(server.stop(exit_timeout_s if was_published else min(0, exit_timeout_s))):
            say(f"stopped    {word}")
