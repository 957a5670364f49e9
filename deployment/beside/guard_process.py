"""The guard of a deployment: a child process in front of the server, started, watched and stopped with it."""

from __future__ import annotations

import socket

from deployment.arguments import ServeArguments
from deployment.doors.address import own_address
from deployment.doors.doors import Doors
from deployment.doors.known_faults import GRPC_ERRORS, faults_of
from deployment.doors.ports import Ports
from deployment.guard.arguments import MAX_BODY_BYTES, GuardArguments
from deployment.processes.watched import WatchedProcess

_QUESTION_S = 2.0
LAST_ANSWERS_S = 2.0
"""For what the server has answered to be passed on, when that has ended."""


class GuardProcess(WatchedProcess):
    """The guard's process.

    Args:
        arguments: of the deployment.
        ports: that it listens on.
        doors: where Triton listens.
        version: of Triton, as far as it is known.
    """

    def __init__(self, arguments: ServeArguments, ports: Ports, doors: Doors, version: str) -> None:
        self._address = own_address(arguments.host), ports.http
        given = GuardArguments(
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
        log = arguments.log.with_name("guard.log")
        super().__init__("deployment.guard", given, log, "the guard", "it")

    def is_up(self) -> bool:
        """Look whether it listens."""
        with socket.create_connection(self._address, timeout=_QUESTION_S):
            return True
