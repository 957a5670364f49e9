"""What every router has: its command line, and who of the replicas gets requests. Standard library only."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from handover.endpoint import Endpoint
from handover.errors import ServerError

_MORE_PLACES = ("/usr/sbin", "/usr/local/sbin")  # where Debian has HAProxy, and a user's PATH has not


@dataclass(frozen=True)
class Front:
    """What clients reach.

    Attributes:
        host: address to listen on.
        ports: by service: http, grpc, openai; of a program with an OpenAI API of its own http alone.
        metrics: port of the summed metrics.
        page: port of loopback at which the page of metrics is made; that of the metrics where no router stands before.
        replicas: number of servers.
        affinity_header: requests with the same value of it go to the same server; None: there is none.
    """

    host: str
    ports: Mapping[str, int]
    metrics: int
    page: int
    replicas: int
    affinity_header: str | None = None


class Router(ABC):
    """A program that passes requests on, before it is started and while it runs.

    Args:
        front: what clients reach.
        command: program and first words; empty: its own.
        directory: private one of the deployment.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    own_command: ClassVar[tuple[str, ...]]
    is_for_openai: ClassVar[bool]
    """It passes on the requests of an OpenAI API alone, and no page of metrics."""

    def __init__(self, front: Front, command: Sequence[str], directory: Path) -> None:
        self._front, self._command, self._directory = front, tuple(command) or self.own_command, directory

    @abstractmethod
    def argv(self) -> tuple[str, ...]:
        """Return the command line, with whatever files it needs written."""

    @abstractmethod
    def is_up(self) -> bool:
        """Whether it listens."""

    @abstractmethod
    def admit(self, number: int, endpoint: Endpoint) -> None:
        """Open a replica to requests; ServerError: the router does not take it."""

    @abstractmethod
    def withdraw(self, number: int) -> None:
        """Close a replica to new requests; those that it has go on. ServerError: the router does not answer."""

    @abstractmethod
    def in_flight(self, number: int) -> int | None:
        """Count the requests that a replica has; None: they are not counted. ServerError: no answer."""

    @abstractmethod
    def sent_bytes(self, number: int) -> int | None:
        """Count what has come back from a replica; None: the router does not know."""

    def program(self) -> str:
        """Return the program's path; ServerError: it is not here."""
        return find_program(self._command[0], self.title)


def find_program(program: str, title: str) -> str:
    """Return a router's program; ServerError: it is not here."""
    found = shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", os.defpath), *_MORE_PLACES)))
    if found is None:
        raise ServerError(
            f"{title} is not here: there is no program '{program}'",
            "install it (Debian: apt-get install haproxy; pip install sglang-router, or vllm-router), or name it in "
            "deployment.router_command",
        )
    return found
