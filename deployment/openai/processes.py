"""Several processes that listen on one port: the kernel shares connections out among them."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from deployment.openai.arguments import OpenAIArguments
from deployment.processes import die_with_parent
from deployment.restarts import MOST_RESTARTS, Restarts
from deployment.supervise import describe
from handover.errors import ServerError

_PROJECT = Path(__file__).resolve().parents[2]
_POLL_S = 0.2
_GRACE_S = 3.0
"""What a process gets for its end beyond the time for requests in flight."""


def run_processes(arguments: OpenAIArguments) -> None:
    """Run the endpoint in as many processes as the arguments say, until SIGTERM or Ctrl-C.

    One that has died is started again, while the others go on.

    Raises:
        ServerError: the port is taken, or processes died too often; the others are stopped then.
    """
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with _held_port(arguments.host, arguments.port) as port:
        share = -(-arguments.max_requests // arguments.processes)
        one = replace(arguments, port=port, processes=1, shares_port=True, max_requests=share)
        restarts = Restarts()
        children = [_start(one) for _ in range(arguments.processes)]
        try:
            while not stopped:
                time.sleep(_POLL_S)
                for place, child in enumerate(children):
                    if child.poll() is not None and not stopped:
                        children[place] = _replace(child, one, restarts)
        finally:
            _end(children, arguments.exit_timeout_s + _GRACE_S)


def _start(arguments: OpenAIArguments) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "deployment.openai", *arguments.to_argv()]
    return subprocess.Popen(command, cwd=_PROJECT, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)


def _replace(child: subprocess.Popen[bytes], arguments: OpenAIArguments, restarts: Restarts) -> subprocess.Popen[bytes]:
    """Start a process in place of one that has ended; ServerError: that has happened too often."""
    ended = f"a process of the OpenAI endpoint {describe(child.returncode)}"
    number = restarts.take()
    if number is None:
        raise ServerError(f"{ended}, the fourth within ten minutes", "see what they printed before")
    sys.stdout.write(f"      openai     {ended}; started again, {number} of {MOST_RESTARTS} within ten minutes\n")
    sys.stdout.flush()
    return _start(arguments)


def _end(children: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    for child in children:
        child.terminate()
    deadline = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))
        child.kill()
        child.wait()


@contextlib.contextmanager
def _held_port(host: str, port: int) -> Iterator[int]:
    """Hold a port that processes may share, without listening on it; ServerError: it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((host, port))
        except OSError as error:
            raise ServerError(
                f"port {port} on {host} cannot be used: {error.strerror or error}",
                "choose another port, or 0 for a free one",
            ) from error
        yield int(holder.getsockname()[1])
