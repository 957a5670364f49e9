"""The guard of a deployment: a child process in front of the server, started, watched and stopped with it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deployment.address import own_address
from deployment.arguments import ServeArguments
from deployment.doors import Doors
from deployment.guard.arguments import MAX_BODY_BYTES, GuardArguments
from deployment.heartbeat import Heartbeat, ending
from deployment.known_faults import GRPC_ERRORS, faults_of
from deployment.ports import Ports
from deployment.processes import die_with_parent
from deployment.restarts import MOST_RESTARTS, Restarts
from deployment.supervise import ServerDiedError, describe, last_lines
from handover.errors import ServerError

_PROJECT = Path(__file__).resolve().parent.parent
_PATIENCE_S = 60.0
_QUESTION_S = 2.0
_LAST_ANSWERS_S = 2.0


class GuardProcess:
    """The guard's process.

    Args:
        arguments: of the deployment.
        ports: that it listens on.
        doors: where Triton listens.
        version: of Triton, as far as it is known.
    """

    def __init__(self, arguments: ServeArguments, ports: Ports, doors: Doors, version: str) -> None:
        self._log = arguments.log.with_name("guard.log")
        self._address = own_address(arguments.host), ports.http
        self._restarts = Restarts()
        self._arguments = GuardArguments(
            host=arguments.host,
            http_port=ports.http,
            grpc_port=ports.grpc,
            metrics_port=ports.metrics,
            triton_host=doors.host,
            triton_http_port=doors.ports.http,
            triton_grpc_port=doors.ports.grpc,
            triton_metrics_port=doors.ports.metrics,
            takes_grpc_errors=GRPC_ERRORS not in faults_of(version),
            max_body_bytes=arguments.guard_max_body_bytes or MAX_BODY_BYTES,
        )
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._heartbeat = Heartbeat()
        with self._log.open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployment.guard", *self._arguments.to_argv()],
                cwd=_PROJECT,
                env={**os.environ, **self._heartbeat.variables},
                pass_fds=self._heartbeat.files,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops this one last
                preexec_fn=die_with_parent,
            )
        self._heartbeat.has_begun()
        return process

    def wait_until_up(self, is_stopped: Callable[[float], bool]) -> None:
        """Wait until it listens, or the deployment is asked to stop.

        Raises:
            ServerError: it ended, such as for a port that is taken, or does not listen in time.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while not is_stopped(0.05):
            if (status := self._process.poll()) is not None:
                raise ServerError(f"the guard {describe(status)}{self._quoted_log()}")
            with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=_QUESTION_S):
                return
            if time.monotonic() > deadline:
                raise ServerError(f"the guard does not listen on port {self._address[1]}{self._quoted_log()}")

    def watch(self) -> str:
        """Start it again if it has died or hangs; the server goes on meanwhile.

        Returns:
            What happened, for the operator; empty: it runs.

        Raises:
            ServerDiedError: it has died too often.
        """
        ended = ending(self._process, self._heartbeat)
        if not ended:
            return ""
        number = self._restarts.take()
        if number is None:
            raise ServerDiedError(f"the guard {ended}, for the fourth time within ten minutes{self._quoted_log()}")
        self._heartbeat.close()
        self._process = self._start()
        return f"it {ended}; started again, {number} of {MOST_RESTARTS} within ten minutes"

    def stop(self) -> None:
        """End it, once it has passed on what the server has answered; that has ended by now."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_ANSWERS_S)
        self._process.kill()
        self._process.wait()
        self._heartbeat.close()

    def _quoted_log(self) -> str:
        return "".join(f"\n    {line}" for line in last_lines(self._log))
