"""One server of several, with a supervisor of its own: what all have, and one whose supervisor is a child process.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from deployment.arguments import EngineArguments, ServeArguments
from deployment.doors.address import LOOPBACK
from deployment.processes.supervised import describe, last_lines
from handover.endpoint import FILE_NAME, RUN_VARIABLE, Endpoint, is_published
from handover.errors import ServerError
from handover.reasons import reason_in

_PROJECT = Path(__file__).resolve().parents[2]
_KILL_S = 5.0


class NotNowError(ServerError):
    """A replica cannot be told something for now; it goes on as it was, and may be told again."""


class Place(Enum):
    """Where a replica is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    AWAY = "away"  # its supervisor starts the server again, or it is being stopped
    ENDED = "ended"


class Replica(ABC):
    """A server that publishes an endpoint file of its own, in ``replica-N`` beside that of the deployment.

    Args:
        number: from 0.
        deployment: directory of the deployment.

    Attributes:
        log: of its supervisor.
        place: where it was at the last look.
        restarts: how often it was started again.
    """

    log: Path
    place: Place

    def __init__(self, number: int, deployment: Path) -> None:
        self.number, self.restarts = number, 0
        self.directory = deployment / f"replica-{number}"
        self.endpoint_file = self.directory / FILE_NAME

    def endpoint(self) -> Endpoint:
        """Read where it listens; ServerError: it has just gone."""
        return Endpoint.read(self.endpoint_file)

    @abstractmethod
    def start(self) -> None:
        """Start it, or start it again."""

    @abstractmethod
    def look(self) -> Place:
        """Look where it is now."""

    @abstractmethod
    def reason(self) -> str:
        """Return why it has ended, in its own words where it had any."""

    @property
    @abstractmethod
    def was_killed(self) -> bool:
        """Whether it ended by another's will: else its supervisor has given the server up."""

    @abstractmethod
    def ask_to_stop(self) -> None:
        """Ask it to end once its requests in flight are answered."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait for its end; after that time it is killed."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, and what belongs to it; ServerError: it does not end."""

    @abstractmethod
    def leave(self) -> None:
        """Begin a restart, once its requests in flight are answered."""

    @abstractmethod
    def come_back(self) -> bool:
        """Start it again if it has left; return whether it has."""


class ChildReplica(Replica):
    """A server whose supervisor is a child of this process.

    Args:
        number: from 0.
        program: module that serves.
        arguments: of the deployment: the replica listens on free ports of loopback.
        gpus: that each replica takes; 0: there are none.
        cores: of its own; empty: all.
    """

    def __init__(
        self, number: int, program: str, arguments: ServeArguments | EngineArguments, gpus: int, cores: Collection[int]
    ) -> None:
        super().__init__(number, arguments.endpoint.parent)
        self.log = self.directory / "deploy.log"
        first = number * gpus
        devices = ",".join(map(str, range(first, first + gpus)))
        own = own_arguments(arguments, self.directory, LOOPBACK, devices)
        self._command = [sys.executable, "-m", program, *own.to_argv()]
        self._cores = set(cores)
        self._process: subprocess.Popen[bytes] | None = None
        self._run = ""
        self.place = Place.ENDED

    def start(self) -> None:
        """Start it, or start it again."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._run = uuid.uuid4().hex
        with self.log.open("ab" if self._process else "wb") as stream:
            self._process = subprocess.Popen(
                self._command,
                cwd=_PROJECT,
                env={**os.environ, RUN_VARIABLE: self._run},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # it stops its server in good order by itself when this process has ended
                preexec_fn=self._take_cores if self._cores else None,
            )
        self.place = Place.STARTING

    def look(self) -> Place:
        """Look where it is now."""
        assert self._process is not None
        if self._process.poll() is not None:
            self.place = Place.ENDED
        elif is_published(self.endpoint_file, self._run):
            self.place = Place.SERVING
        elif self.place is Place.SERVING:
            self.place = Place.AWAY
        return self.place

    def reason(self) -> str:
        """Return why it has ended, in its own words where it had any."""
        assert self._process is not None
        status = self._process.poll()
        said = reason_in(last_lines(self.log))
        how = describe(status) if status is not None else "does not end"
        return f"replica {self.number} {how}{f': {said}' if said else ''} ({self.log})"

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended its supervisor, which else tells by its status that it has given the server up."""
        return self._process is not None and (self._process.poll() or 0) < 0

    def ask_to_stop(self) -> None:
        """Ask it to end once its requests in flight are answered."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> None:
        """Wait for its end; after that time it is killed, and its helper sweeps what it leaves."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, timeout_s))
            return
        self.kill()

    def kill(self) -> None:
        """Kill its supervisor: the supervisor's helper ends the server and what belongs to it."""
        assert self._process is not None
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        if self._process.poll() is None:
            raise ServerError(f"replica {self.number}, pid {self._process.pid}, cannot be killed")

    def leave(self) -> None:
        """Ask it to end."""
        self.ask_to_stop()

    def come_back(self) -> bool:
        """Start it again if it has ended."""
        if self.place is not Place.ENDED:
            return False
        self.start()
        return True

    def _take_cores(self) -> None:
        os.sched_setaffinity(0, self._cores)


def own_arguments(
    arguments: ServeArguments | EngineArguments, directory: Path, host: str, devices: str
) -> ServeArguments | EngineArguments:
    """Return a replica's arguments: where it is and listens; all else is the deployment's."""
    own: dict[str, Any] = {
        "endpoint": directory / FILE_NAME,
        "log": directory / "server.log",
        "host": host,
        "cuda_devices": devices,
    }
    if isinstance(arguments, EngineArguments):
        return replace(arguments, **own, http_port=0)
    openai_port = None if arguments.openai_port is None else 0
    return replace(arguments, **own, http_port=0, grpc_port=0, metrics_port=0, openai_port=openai_port)


def parts_of_cores(replicas: int, cores: Collection[int]) -> list[list[int]]:
    """Divide cores among replicas without GPUs; where there are too few, none is told apart: each has all of them."""
    ordered, share = sorted(cores), len(cores) // replicas
    return [ordered[number * share : (number + 1) * share] for number in range(replicas)]
