"""A deployment of another project's server while it runs: started, proved, watched, started again, ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from deployment.address import own_address
from deployment.arguments import EngineArguments
from deployment.engines.process import EngineServer, environment_of
from deployment.engines.publishing import publish
from deployment.engines.questions import CompletionProbe, ask_version
from deployment.engines.table import PROGRAMS, build_argv, lasting_argv
from deployment.leftovers import State, Sweeper, create_state, remove_files, sweep, withdraw
from deployment.ports import choose_ports
from deployment.stop_request import StopRequest
from deployment.supervise import ServerDiedError
from handover.errors import ServerError
from handover.progress import human_time, say

_POLL_S = 0.2
_SAY_EVERY_S = 15.0


def find_port(arguments: EngineArguments) -> int:
    """Check the given port, or choose a free one; ServerError."""
    given = {"http": arguments.http_port, "grpc": 0, "metrics": 0}
    return choose_ports(arguments.host, given).http


class EngineDeployment:
    """One server at a time, and what is left of it swept away.

    Args:
        arguments: of this process.
        stop: ends the deployment.
        edited: files of the directory that were edited after they were written.
    """

    def __init__(self, arguments: EngineArguments, stop: StopRequest, edited: Sequence[str]) -> None:
        self._given, self._stop, self._edited = arguments, stop, edited
        self._program = PROGRAMS[arguments.engine]
        self._is_serving = False

    def run(self) -> None:
        """Bring the server up and watch it until it is asked to stop.

        Raises:
            ServerError: the server did not start in time, or it died more often than it may be restarted.
        """
        if self._stop.came(0):
            return
        state = create_state(self._given.endpoint)
        sweeper = Sweeper(state)
        try:
            self._run(state, find_port(self._given))
        finally:
            sweep(state)
            remove_files(self._given.endpoint, state.prefix)
            sweeper.dismiss()

    def _run(self, state: State, port: int) -> None:
        directory = Path(state.directory)
        argv = build_argv(self._program, self._given, port)
        say(f"starting   {self._program.title}: {argv[0]}, log {self._given.log}")
        for restarts in range(self._given.restart + 1):
            started = time.monotonic()
            environment = environment_of(directory)
            server = EngineServer(self._program.title, argv, environment, directory, self._given.log, restarts > 0)
            try:
                return self._watch(server, state, port, started)
            except ServerDiedError as error:
                if not self._is_serving or restarts == self._given.restart:
                    raise
                say(f"restarting {restarts + 1} of {self._given.restart}: {error.problem}")
            finally:
                self._end(server, state)

    def _watch(self, server: EngineServer, state: State, port: int, started: float) -> None:
        address = own_address(self._given.host)
        base = f"http://{f'[{address}]' if ':' in address else address}:{port}"
        model = self._wait_until_it_generates(server, base)
        if not model:
            return
        version, start_s = ask_version(base, self._program), time.monotonic() - started
        told = lasting_argv(self._program, self._given)
        publish(self._given, state, port, told, model, version, start_s, self._edited)
        say(f"serving    {self._program.title} {version}  {base}/v1  {self._given.endpoint}")
        self._is_serving = True
        while not self._stop.came(_POLL_S):
            server.check()

    def _wait_until_it_generates(self, server: EngineServer, base: str) -> str:
        """Wait for the probe's generation and say now and then for how long.

        Returns:
            The name by which the server knows the model; empty if the deployment was asked to stop before.
        """
        timeout_s = self._given.start_timeout_s
        started = said = time.monotonic()
        probe = CompletionProbe(base, self._program, timeout_s)
        while not self._stop.came(_POLL_S):
            server.check()
            try:
                if probe.is_done():
                    say(f"ready      a generation came back after {time.monotonic() - started:.1f} s")
                    return probe.model
            except ServerError as error:
                raise server.explain(error.problem) from error
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                waited, most = human_time(said - started), human_time(timeout_s)
                say(f"starting   for {waited}, at most {most} (deployment.start_timeout_s)")
            if time.monotonic() - started > timeout_s:
                raise server.explain(f"no generation came back within {timeout_s:g} s")
        return ""

    def _end(self, server: EngineServer, state: State) -> None:
        """Stop the server; requests in flight are waited for where it was asked to stop, and no other time."""
        # First of all: no client shall find a server that is stopping.
        was_published = withdraw(self._given.endpoint, state.prefix)
        if self._stop.reason:
            say(f"stopping   {self._stop.reason}")
        exit_timeout_s = self._given.exit_timeout_s
        if not self._is_serving:
            server.stop(min(0, exit_timeout_s))
        elif not self._stop.reason:
            server.stop(None)
        elif word := server.word_of_crash(server.stop(exit_timeout_s if was_published else min(0, exit_timeout_s))):
            say(f"stopped    {word}")
