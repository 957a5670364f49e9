"""The processes that serve one model together, each supervised on its node, as the first one's supervisor sees them.

The first writes its address and a key into a file beside the endpoint file; the others connect, prove the key, prove
their files, and do what they are told: start, stop, end. What becomes of one is reported to the first, which ends all
of them or starts all of them again. Standard library only.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.fastertransformer.engine.parallel.handshake import (
    Listener,
    connect,
    own_addresses,
    publish_address,
    welcome,
)
from backends.fastertransformer.engine.parallel.rank import Ranks
from deployment.arguments import NODE
from deployment.doors.address import listening_host
from deployment.processes.supervised import ServerDiedError
from deployment.ranks.channel import Channel
from handover.errors import ServerError
from handover.progress import human_time, say

_POLL_S = 0.1
_SAY_EVERY_S = 15.0
_NOTICED_S = 0.3
"""For the end of a connection to be noticed; the process at its other end has ended before."""
_STOPPED_S, _ENDED_S = 15.0, 10.0
"""For another process's server to end when it is told to, and then for the process itself."""


@dataclass
class _Other:
    """Another process.

    Attributes:
        rank: its number.
        channel: to it.
        host: on which it runs.
        is_ready: it has proved its files.
        is_serving: it has been told to start, and not reported that it has stopped since.
        has_started: it has reported that what it was told to start takes part.
        problem: what went wrong there.
        is_over: it cannot be started again.
    """

    rank: int
    channel: Channel
    host: str = ""
    is_ready: bool = False
    is_serving: bool = False
    has_started: bool = False
    problem: str = ""
    is_over: bool = False


class Gathered:
    """All processes but the first.

    Args:
        ranks: of the first process, whose supervisor this is.
        environment: of this process.
        digest: of the model that is served, which the others must have too.
    """

    def __init__(self, ranks: Ranks, environment: Mapping[str, str], digest: str) -> None:
        self._ranks, self._digest = ranks, digest
        self._others: dict[int, _Other] = {}
        self._key = secrets.token_bytes(16)
        address, interface = _addresses(ranks, environment)
        self._listener = Listener(interface, self._accept)
        Path(ranks.rendezvous).unlink(missing_ok=True)
        publish_address(ranks, address, self._listener.port, self._key)

    def _accept(self, sock: socket.socket) -> None:
        _, rank, connection = welcome(sock, self._key, b"")
        if 0 < rank < self._ranks.world_size:
            self._others[rank] = _Other(rank, Channel(connection))
        else:
            connection.close()

    @property
    def address(self) -> str:
        """Address of this host by which another process has reached it."""
        return self._others[1].channel.own_address

    def wait_until_ready(self, came: Callable[[float], bool]) -> bool:
        """Wait until every process has come and proved its files; returns False where ``came`` says to stop.

        Who has come may take as long for the proof as the files are large: it is heard of meanwhile.

        Raises:
            ServerError: one reports that it cannot serve, or they are not all there in time.
        """
        started = said = time.monotonic()
        while missing := [rank for rank in range(1, self._ranks.world_size) if not self._is_ready(rank)]:
            if came(_POLL_S):
                return False
            self.check()
            absent = [str(rank) for rank in missing if rank not in self._others]
            if absent and time.monotonic() - started > self._ranks.timeout_s:
                raise ServerError(
                    f"of {self._ranks.world_size} processes these have not come within {self._ranks.timeout_s:g} s: "
                    f"{', '.join(absent)}",
                    "look for their errors in the stage's log, or raise deployment.start_timeout_s",
                )
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                listed = ", ".join(map(str, missing))
                say(f"waiting    for {human_time(said - started)}, for these of the processes: {listed}")
        hosts = ", ".join(self._others[rank].host for rank in sorted(self._others))
        say(f"together   {self._ranks.world_size} processes: this one, and on {hosts}")
        return True

    def _is_ready(self, rank: int) -> bool:
        return rank in self._others and self._others[rank].is_ready

    def check(self) -> None:
        """Hear what the others report.

        Raises:
            ServerDiedError: a server of one has died, or stands still: another start may help.
            ServerError: one is lost, or cannot serve.
        """
        for other in list(self._others.values()):
            while message := other.channel.receive():
                self._hear(other, message)
            if other.problem:
                raise (ServerError if other.is_over else ServerDiedError)(f"{self._name(other)}: {other.problem}")
            self._check_channel(other)

    def check_channels(self) -> None:
        """Look whether a launcher asks this process to stop because it has lost another, as srun does.

        Raises:
            ServerError: one is lost.
        """
        deadline = time.monotonic() + _NOTICED_S
        while time.monotonic() < deadline:
            for other in list(self._others.values()):
                self._check_channel(other)
            time.sleep(_POLL_S)

    def _check_channel(self, other: _Other) -> None:
        if other.channel.lost:
            raise ServerError(f"{self._name(other)}, is lost: {other.channel.lost}")

    def _name(self, other: _Other) -> str:
        return f"process {other.rank} of {self._ranks.world_size}, on {other.host or 'another node'}"

    def _hear(self, other: _Other, message: Mapping[str, Any]) -> None:
        other.host = message.get("host", other.host)
        if "digest" in message:
            other.is_ready = True
            if message["digest"] != self._digest:
                other.problem, other.is_over = "its node has another model at the same path, by its manifest", True
        elif "problem" in message:
            other.problem, other.is_over = message["problem"], bool(message.get("is_over"))
        elif "started" in message:
            other.has_started = True
        elif "stopped" in message:
            other.is_serving = False

    def order_start(self, port: int, token: str = "") -> None:
        """Tell all to start their servers, which find each other on this host behind that port, by that token."""
        for other in self._others.values():
            other.is_serving, other.has_started, other.problem = True, False, ""
            other.channel.send(order="start", address=self.address, port=port, token=token)

    def have_started(self) -> bool:
        """Return whether all have reported that what they were told to start takes part."""
        return all(other.has_started for other in self._others.values())

    def order_stop(self) -> None:
        """Tell all to stop their servers."""
        for other in self._others.values():
            other.channel.send(order="stop")

    def wait_until_stopped(self) -> None:
        """Wait until all have reported that nothing of their servers is left, or are lost."""
        deadline = time.monotonic() + _STOPPED_S
        while time.monotonic() < deadline:
            with suppress(ServerError):  # what led to the stop
                self.check()
            if not any(other.is_serving and not other.channel.lost for other in self._others.values()):
                return
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Tell all to end, and wait for that a little."""
        self._listener.close()
        deadline = time.monotonic() + _ENDED_S
        for other in self._others.values():
            other.channel.send(order="end")
        for other in self._others.values():
            other.channel.wait_until_lost(max(0.0, deadline - time.monotonic()))
            other.channel.close()
        Path(self._ranks.rendezvous).unlink(missing_ok=True)


def _addresses(ranks: Ranks, environment: Mapping[str, str]) -> tuple[str, str]:
    """Return this host's address for the others, and the address to listen on."""
    if not ranks.is_one_host and (environment.get("SLURM_JOB_ID") or environment.get("POD_IP")):
        address = listening_host(NODE, environment)
        return address, address
    return own_addresses(ranks)


def join(ranks: Ranks, came: Callable[[float], bool]) -> Channel | None:
    """Find the first process by its file, and connect to it; None where ``came`` says to stop.

    Raises:
        ServerError: it has not come in time.
    """
    deadline = time.monotonic() + ranks.timeout_s
    while not came(_POLL_S):
        # The file may be missing, or an earlier start's, whose port is closed.
        with suppress(OSError, ValueError, KeyError, TypeError):
            address = json.loads(Path(ranks.rendezvous).read_text())
            if address["run"] == ranks.run:
                return Channel(connect(address, ranks.rank, 0)[0])
        if time.monotonic() > deadline:
            raise ServerError(
                f"rank 0 is lost: it has not come within {ranks.timeout_s:g} s ({ranks.rendezvous})",
                "look for its error in the stage's log",
            )
    return None
