"""The guard in front of a tritonserver: HTTP, gRPC and metrics, each on a port of its own. See docs/serving.md.

Requests that could end the server are refused; all others, and all answers, pass as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
from collections.abc import Callable, Sequence

from deployment.guard.arguments import GuardArguments
from deployment.guard.checks import Checks
from deployment.guard.doors import Client, Door
from deployment.guard.events import run
from deployment.guard.grpc_door import GrpcClient
from deployment.guard.http_door import HttpClient
from deployment.guard.limits import Memory
from deployment.processes.heartbeat import Beating
from handover.errors import ServerError, exit_status

_BACKLOG, _ACCEPTED_AT_ONCE = 1024, 16
"""Connections that wait to be accepted, and those that are before anything else is done."""
_BODIES_IN_MEMORY = 4
"""Largest ones at a time; of smaller ones there may be more."""
_LAST_ANSWERS_S, _LOOK_S = 1.0, 0.01
_YOUNG_OBJECTS = 50_000


def main(argv: Sequence[str]) -> None:
    """Serve until stopped."""
    arguments = GuardArguments.from_argv(argv, __doc__)
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a shell's 1024 are few connections
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 100)  # lists of a request are no garbage: looking through them takes as long
    run(serve(arguments))


async def serve(arguments: GuardArguments) -> None:
    """Open the doors, and pass requests on until SIGTERM; ServerError: a port is taken."""
    memory, checks = Memory(_BODIES_IN_MEMORY * arguments.max_body_bytes), Checks()
    loop = asyncio.get_running_loop()

    doors = []

    async def open_door(port: int, triton_port: int, name: str, make: Callable[[Door], Client]) -> asyncio.Task[None]:
        door = Door(
            (arguments.triton_host, triton_port), arguments.max_body_bytes, memory, checks, arguments.takes_grpc_errors
        )
        try:
            server = await loop.create_server(lambda: make(door), arguments.host, port, backlog=_ACCEPTED_AT_ONCE)
            for each in server.sockets:
                with each.dup() as listening:
                    listening.listen(_BACKLOG)
        except (OSError, UnicodeError) as error:
            raise ServerError(
                f"port {port} on {arguments.host} cannot be used for {name}: {getattr(error, 'strerror', '') or error}",
                f"choose another deployment.{name}_port, or 0 for a free one",
            ) from error
        doors.append(door)
        return loop.create_task(door.watch())

    metrics = await open_door(
        arguments.metrics_port, arguments.triton_metrics_port, "metrics", lambda door: HttpClient(door, False)
    )
    grpc = await open_door(arguments.grpc_port, arguments.triton_grpc_port, "grpc", GrpcClient)
    http = await open_door(arguments.http_port, arguments.triton_http_port, "http", HttpClient)
    beating = loop.create_task(Beating().go_on())
    await _stop_signal()
    deadline = loop.time() + _LAST_ANSWERS_S
    while any(map(len, doors)) and loop.time() < deadline:  # Triton has ended, what it has said is on its way
        await asyncio.sleep(_LOOK_S)
    for task in (metrics, grpc, http, beating):
        task.cancel()


async def _stop_signal() -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "guard"))
