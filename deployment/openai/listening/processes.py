"""Several processes that listen on one port: the kernel shares connections out among them."""

from __future__ import annotations

import contextlib
import os
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
from deployment.processes.heartbeat import Beating, Heartbeat, ending
from deployment.processes.linux import die_with_parent
from deployment.processes.restarts import MOST_RESTARTS, Restarts
from handover.errors import ServerError

_PROJECT = Path(__file__).resolve().parents[3]
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
        beating = Beating()
        one = replace(arguments, port=port, processes=1, shares_port=True, max_requests=share)
        restarts = Restarts()
        children = [_Child(one) for _ in range(arguments.processes)]
        try:
            while not stopped:
                time.sleep(_POLL_S)
                beating.beat()
                for place, child in enumerate(children):
                    if (ended := child.ended()) and not stopped:
                        _say_replaced(ended, restarts)
                        children[place] = _Child(one)
        finally:
            _end([child.process for child in children], arguments.exit_timeout_s + _GRACE_S)


class _Child:
    """One of the processes."""

    def __init__(self, arguments: OpenAIArguments) -> None:
        command = [sys.executable, "-m", "deployment.openai", *arguments.to_argv()]
        self._heartbeat = Heartbeat()
        self.process = subprocess.Popen(
            command,
            cwd=_PROJECT,
            env={**os.environ, **self._heartbeat.variables},
            pass_fds=self._heartbeat.files,
            stdin=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        self._heartbeat.has_begun()

    def ended(self) -> str:
        """Look once: say how it has ended, which it must if it stands still; empty: it goes on."""
        if ended := ending(self.process, self._heartbeat):
            self._heartbeat.close()
        return ended


def _say_replaced(ended: str, restarts: Restarts) -> None:
    """Log that a process takes the place of one that has ended; ServerError: that has happened too often."""
    problem = f"a process of the OpenAI endpoint {ended}"
    number = restarts.take()
    if number is None:
        raise ServerError(f"{problem}, the fourth within ten minutes", "see what they printed before")
    sys.stdout.write(f"      openai     {problem}; started again, {number} of {MOST_RESTARTS} within ten minutes\n")
    sys.stdout.flush()


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
