"""A deployment of another project's server while it runs; see deployment/lifecycle.py for what every one has."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from deployment.address import own_address
from deployment.arguments import EngineArguments
from deployment.engines.process import EngineServer, environment_of
from deployment.engines.publishing import publish
from deployment.engines.questions import CompletionProbe, ask_version
from deployment.engines.table import PROGRAMS, build_argv, lasting_argv
from deployment.leftovers import State
from deployment.lifecycle import Lifecycle
from deployment.ports import choose_ports
from deployment.stop_request import StopRequest
from handover.progress import say


def find_port(arguments: EngineArguments) -> int:
    """Check the given port, or choose a free one; ServerError."""
    given = {"http": arguments.http_port, "grpc": 0, "metrics": 0}
    return choose_ports(arguments.host, given).http


class EngineDeployment(Lifecycle[EngineServer]):
    """The server of another project.

    Args:
        arguments: of this process.
        stop: ends the deployment.
        edited: files of the directory that were edited after they were written.
    """

    def __init__(self, arguments: EngineArguments, stop: StopRequest, edited: Sequence[str]) -> None:
        super().__init__(arguments, stop)
        self._arguments, self._edited = arguments, edited
        self._program = PROGRAMS[arguments.engine]

    def _prepare_start(self, state: State) -> Callable[[bool], EngineServer]:
        directory, title, log = Path(state.directory), self._program.title, self._arguments.log
        self._port = find_port(self._arguments)
        argv = build_argv(self._program, self._arguments, self._port)
        say(f"starting   {title}: {argv[0]}, log {log}")

        def start(is_again: bool) -> EngineServer:
            return EngineServer(title, argv, environment_of(directory), directory, log, is_again)

        return start

    def _open(self, server: EngineServer, state: State, started: float) -> bool:
        address = own_address(self._arguments.host)
        base = f"http://{f'[{address}]' if ':' in address else address}:{self._port}"
        probe = CompletionProbe(base, self._program, self._arguments.start_timeout_s)
        if not self._wait_until_it_generates(server, probe):
            return False
        version, start_s = ask_version(base, self._program), time.monotonic() - started
        told = lasting_argv(self._program, self._arguments)
        publish(self._arguments, state, self._port, told, probe.model, version, start_s, self._edited)
        say(f"serving    {self._program.title} {version}  {base}/v1  {self._arguments.endpoint}")
        return True
