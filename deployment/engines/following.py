"""One engine over several processes: the deployment of one that is not the first, see ``leading.py``.

Its supervisor proves the files of its node and does what the first one's says. It reports what becomes of its server,
and ends it where the first one is lost.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from deployment.arguments import EngineArguments
from deployment.engines.leading import environment_over_nodes
from deployment.engines.nodes import Meeting
from deployment.engines.process import EngineServer
from deployment.engines.ray_nodes import RAY, RayNode, node_address, ray_environment
from deployment.engines.running import find_port
from deployment.engines.table import PROGRAMS, build_argv
from deployment.life.lifecycle import leaving_nothing
from deployment.life.stop_request import StopRequest
from deployment.processes.supervised import ServerDiedError
from deployment.ranks.channel import Channel
from deployment.ranks.launchers import Rank
from handover.errors import ServerError
from handover.progress import say

_POLL_S = 0.2
_FAREWELL_S = 20.0
"""For the first process's word, beyond what requests in flight get, where this process was asked to stop as well."""
_SHORTER_S = -1.0
"""A server without clients has that much less than the grace at its end."""


class Following:
    """The deployment of one process.

    Args:
        arguments: of this process.
        stop: ends the deployment; the first process is asked too, and its word is awaited.
        rank: of this process.
        channel: to the first one.
    """

    def __init__(self, arguments: EngineArguments, stop: StopRequest, rank: Rank, channel: Channel) -> None:
        self._arguments, self._stop, self._rank, self._channel = arguments, stop, rank, channel
        self._program, self._give_up_at = PROGRAMS[arguments.engine], 0.0
        self._is_again = False

    def run(self) -> None:
        """Do what the first process says until it says that this is all.

        Raises:
            ServerError: the first process is lost.
        """
        with leaving_nothing(self._arguments.endpoint) as state:
            order = self._next_order()
            while order["order"] != "end":
                if order["order"] == "start":
                    order = self._serve(Path(state.directory), order)
                    self._channel.send(stopped=True)
                if order["order"] != "end":
                    order = self._next_order()

    def _next_order(self, server: EngineServer | None = None) -> dict[str, Any]:
        """Wait for the first process's word, and report meanwhile what becomes of the server."""
        is_reported = has_started = False
        while (order := self._channel.receive()) is None:
            if self._channel.lost:
                raise ServerError(f"rank 0 is lost: {self._channel.lost}")
            if self._is_over():
                return {"order": "end"}
            try:
                if server is not None and not is_reported:
                    server.check()
                    if not has_started and server.has_started:
                        has_started = True
                        self._channel.send(started=True)
            except ServerDiedError as error:
                is_reported = True
                say(f"ended      {error.problem.splitlines()[0]}")
                self._channel.send(problem=error.problem)
        return order

    def _is_over(self) -> bool:
        """Wait a moment; return whether a request to stop has been there for too long."""
        if not self._stop.came(_POLL_S):
            return False
        time.sleep(_POLL_S)
        now = time.monotonic()
        self._give_up_at = self._give_up_at or now + max(0.0, self._arguments.exit_timeout_s) + _FAREWELL_S
        return now > self._give_up_at

    def _serve(self, directory: Path, order: dict[str, Any]) -> dict[str, Any]:
        """Run the server until the first process says otherwise; returns what it has said."""
        server = self._start(directory, order)
        self._is_again = True
        try:
            return self._next_order(server)
        finally:
            server.stop(_SHORTER_S)

    def _start(self, directory: Path, order: dict[str, Any]) -> EngineServer:
        arguments, title, own_address = self._arguments, self._program.title, self._channel.own_address
        meeting = Meeting(self._rank.rank, self._rank.world_size, order["address"], order["port"])
        if arguments.distributed_executor == RAY:
            address = node_address(own_address, meeting.rank)
            environment = ray_environment(environment_over_nodes(arguments, directory, address), order["token"])
            say(f"starting   Ray for {title}, node {meeting.rank} of {meeting.count}, log {arguments.log}")
            return RayNode(arguments, meeting, address, environment, directory, arguments.log, self._is_again)
        argv = build_argv(self._program, arguments, find_port(arguments), meeting)
        environment = environment_over_nodes(arguments, directory, own_address)
        say(f"starting   {title}: {argv[0]}, process {meeting.rank} of {meeting.count}, log {arguments.log}")
        return EngineServer(title, argv, environment, directory, arguments.log, self._is_again)
