"""Serve one model with several servers until stopped: ``python3 -m deployment.replicas.serve --help``.

The order: take the endpoint file's lock, sweep what a killed run left, choose ports, start the router and the replicas,
each of which proves its weights and a generation as a single server does, wait for a generation through the router,
publish the endpoint file, watch. What ends a single server ends all of these.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from deployment.arguments import AnyServer, EngineArguments, ReplicasArguments, ServeArguments
from deployment.doors.address import with_address
from deployment.doors.doors import is_guarded
from deployment.life.kill_wait import within_kill_wait
from deployment.life.leftovers import sweep_earlier, sweep_node
from deployment.life.lock import lock
from deployment.life.stop_request import StopRequest
from deployment.replicas.router import find_program
from deployment.replicas.running import ReplicatedDeployment, find_ports
from deployment.replicas.table import ROUTERS
from handover.errors import ServerError, exit_status, nearest
from handover.progress import say

PROGRAMS = {"deployment.serve": ServeArguments, "deployment.engines.serve": EngineArguments}
"""Modules that serve, and their arguments."""


def main(argv: Sequence[str]) -> None:
    """Serve until stopped; a server that cannot be replaced is an error."""
    given = ReplicasArguments.from_argv(argv, __doc__)
    for word, legal in ((given.program, PROGRAMS), (given.router, ROUTERS)):
        if word not in legal:
            raise ServerError(f"'{word}' is unknown", nearest(word, legal))
    arguments: ServeArguments | EngineArguments
    if PROGRAMS[given.program] is ServeArguments:
        arguments = _fitted(ServeArguments.from_argv(given.server))
    else:
        arguments = _fitted(EngineArguments.from_argv(given.server))
    stop = StopRequest()
    arguments.endpoint.parent.mkdir(parents=True, exist_ok=True)
    with lock(arguments.endpoint):
        if sweep_earlier(arguments.endpoint):
            say("swept      what a killed deployment had left")
        if count := sweep_node():
            say(f"swept      what {count} killed deployments of other results had left on this node")
        kind = ROUTERS[given.router]
        find_program((given.router_command or kind.own_command)[0], kind.title)
        find_ports(arguments)  # before the long part: a port in use is said at once
        if isinstance(arguments, ServeArguments):
            is_guarded(arguments)
        with stop.listening():
            ReplicatedDeployment(given, arguments, stop).run()


def _fitted(arguments: AnyServer) -> AnyServer:
    """Fit the address and the time of the end to where this runs."""
    return within_kill_wait(with_address(arguments, os.environ), os.environ)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "deploy"))
