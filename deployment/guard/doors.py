"""What both doors have: a connection of a client, one to Triton for it, and the times and numbers that are allowed."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any

from deployment.guard.checks import Checks
from deployment.guard.events import Reading, Why
from deployment.guard.limits import Memory
from handover.progress import say

_MOST_CONNECTIONS = 2048
_FILES_PER_CONNECTION, _OTHER_FILES = 6, 64
"""One to the client and one to Triton, at each of three doors."""

_IDLE_S = 900.0
_FIRST_S = 60.0
_REQUEST_S, _LEAST_BYTES_PER_S = 30.0, 16 << 10
_UNREAD_S = 120.0
"""How long a client may leave unread what it was sent."""
_MOST_UNSENT = 16 << 10
"""Bytes that the kernel takes for a client which its window has no room for; by default that may be megabytes."""
_LOOK_S = 1.0
_SAY_EVERY_S = 1.0


def is_slow(passed_s: float, come_bytes: int) -> bool:
    """Whether what comes in takes too long, given the bytes that have come."""
    return passed_s > _REQUEST_S + come_bytes / _LEAST_BYTES_PER_S


class Door:
    """A public port, and where Triton listens for it.

    Args:
        address: Triton's.
        most_bytes: of a request.
        memory, checks: shared by the doors.
        takes_grpc_errors: whether this Triton is safe with streams that ask for gRPC's own errors.
    """

    def __init__(
        self, address: tuple[str, int], most_bytes: int, memory: Memory, checks: Checks, takes_grpc_errors: bool = False
    ) -> None:
        self.takes_grpc_errors = takes_grpc_errors
        self.address, self.most_bytes, self.memory, self.checks = address, most_bytes, memory, checks
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(1, min(_MOST_CONNECTIONS, (files - _OTHER_FILES) // _FILES_PER_CONNECTION))
        self._connections: dict[Client, None] = {}
        self._said, self._unsaid = 0.0, 0

    def enter(self, client: Client) -> bool:
        """Note a new connection; where there are too many, one that waits for no answer gives way.

        That is one that was refused; or that is idle; or whose request is coming in, of these first those that were
        never answered and last for longest; or, of an address that has most of the connections, the oldest, for one
        of another address.
        """
        if len(self._connections) >= self._most:
            rests = [each for each in self._connections if each.is_idle]
            waited = rests or [each for each in self._connections if not each.awaits_answer]
            oldest = min(waited, key=lambda each: (not each.is_over, each.was_answered, each.since), default=None)
            given_up = oldest or self._of_most(client)
            if given_up is None:
                return False
            given_up.transport.abort()
            self.leave(given_up)
        self._connections[client] = None
        return True

    def _of_most(self, client: Client) -> Client | None:
        ((address, count),) = Counter(each.address for each in self._connections).most_common(1)
        if count * 2 <= self._most or address == client.address:
            return None
        return next(each for each in self._connections if each.address == address)

    def __len__(self) -> int:
        """Number of connections."""
        return len(self._connections)

    def leave(self, client: Client) -> None:
        """Forget a connection."""
        self._connections.pop(client, None)

    async def watch(self) -> None:
        """Close connections whose time is up, as long as this runs."""
        while True:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            for client in list(self._connections):
                if client.leaves_unread(now):
                    client.transport.abort()
                elif client.is_late(now):
                    client.give_up()

    def report(self, problem: str) -> None:
        """Log that a request was refused, one line a second at most."""
        now = time.monotonic()
        if now - self._said < _SAY_EVERY_S:
            self._unsaid += 1
            return
        more = f"  and {self._unsaid} more" if self._unsaid else ""
        self._said, self._unsaid = now, 0
        say(f"refused    {problem}{more}")


class Client(asyncio.Protocol, ABC):
    """A connection of a client, and Triton's for it.

    Attributes:
        since: when it began to be idle, or its request to come in.
        is_idle: no request is coming in, and none is being answered.
        is_coming: a request is coming in.
        was_answered: a request or call of it was.
        is_over: what it sends is not read any more.
        address: of the other side.
    """

    def __init__(self, door: Door) -> None:
        self.door = door
        self.transport: Any = None
        self.reading: Reading
        self.triton: Triton | None = None
        self.since, self.is_idle, self.is_coming = time.monotonic(), True, False
        self.come_bytes = 0
        self.has_begun = self.was_answered = self.is_over = False
        self.address: object = None
        self._unread, self._unread_since = 0, 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, and make the one to Triton meanwhile."""
        self.transport, self.address = transport, transport.get_extra_info("peername", " ")[0]
        with contextlib.suppress(OSError):  # no TCP
            sending = transport.get_extra_info("socket")
            sending.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT)
        self.reading = Reading(transport, self.data_received, self.eof_received)
        if self.door.enter(self):
            asyncio.ensure_future(self._connect())
        else:
            transport.abort()  # type: ignore[attr-defined]

    async def _connect(self) -> None:
        try:
            _, triton = await asyncio.get_running_loop().create_connection(
                lambda: Triton(self.answered, self), *self.door.address
            )
        except OSError:
            self.connected(None)
            return
        if self.transport.is_closing():
            triton.transport.abort()
            return
        self.triton = triton
        self.connected(triton)

    @abstractmethod
    def connected(self, triton: Triton | None) -> None:
        """Send what has waited for the connection to Triton; None: there is none to be had."""

    @abstractmethod
    def answered(self, data: bytes) -> None:
        """Take what Triton sends."""

    def give_up(self) -> None:
        """End a connection whose time is up."""
        self.close()

    def begin(self) -> None:
        """Note that a request begins to come in."""
        self.since, self.come_bytes = time.monotonic(), 0
        self.is_idle, self.is_coming, self.has_begun = False, True, True

    def rest(self) -> None:
        """Note that there is nothing to do."""
        self.since, self.is_idle, self.is_coming = time.monotonic(), True, False

    def is_late(self, now: float) -> bool:
        """Whether its time is up."""
        if self.is_coming:
            return is_slow(now - self.since, self.come_bytes)
        return self.is_idle and now - self.since > (_IDLE_S if self.has_begun else _FIRST_S)

    @property
    def awaits_answer(self) -> bool:
        """Whether Triton has got something to answer."""
        return not self.is_idle and not self.is_coming

    def leaves_unread(self, now: float) -> bool:
        """Whether the client has taken nothing for long of what it was sent."""
        unread = self.transport.get_write_buffer_size()
        if not unread or unread != self._unread:
            self._unread, self._unread_since = unread, now
        return now - self._unread_since > _UNREAD_S

    def close(self) -> None:
        """End both connections, once what was written is sent."""
        self.transport.close()
        if self.triton is not None:
            self.triton.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection to Triton too: that is how Triton learns of it."""
        self.reading.stop()
        self.door.leave(self)
        if self.triton is not None:
            self.triton.transport.abort()

    def go_on_sending(self) -> None:
        """Send what Triton did not take before."""

    # Who sends faster than the other side takes waits.

    def pause_writing(self) -> None:
        """The client does not take what Triton sends."""
        if self.triton is not None:
            self.triton.reading.pause(Why.OTHER_SIDE)

    def resume_writing(self) -> None:
        """The client takes it again."""
        if self.triton is not None:
            self.triton.reading.resume(Why.OTHER_SIDE)


class Triton(asyncio.Protocol):
    """A connection to Triton for one client."""

    def __init__(self, receive: Callable[[bytes], None], client: Client) -> None:
        self._receive, self._client = receive, client
        self.transport: Any = None
        self.reading: Reading
        self.is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        self.transport = transport
        self.reading = Reading(transport, self._receive, self.eof_received)

    def connection_lost(self, exc: Exception | None) -> None:
        """Triton has hung up, and so does its client's connection."""
        self.reading.stop()
        self._client.transport.close()

    def pause_writing(self) -> None:
        """Triton does not take what the client sends."""
        self.is_full = True
        self._client.reading.pause(Why.OTHER_SIDE)

    def resume_writing(self) -> None:
        """Triton takes it again."""
        self.is_full = False
        self._client.reading.resume(Why.OTHER_SIDE)
        self._client.go_on_sending()
