"""Control connections between rank 0 and every other rank: messages, heartbeats, and loss detection.

Rank 0 writes its address into a file, for which the others wait (see handshake.py). Each has two connections to rank 0.
One is for messages: they arrive sooner than by a broadcast of gloo's. On the other both ends send a heartbeat every
second. A rank whose heartbeats stop, or that hangs up, is lost, however it ended and whatever the other ranks wait for.
A network that lacks a rank cannot compute, so every process that detects the loss ends. With several hosts, further
connections lead to rank 0's store.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from ..errors import EngineError
from .handshake import LOOPBACK, Listener, connect, forward, hang_up, own_addresses, publish_address, welcome
from .rank import Ranks

_log = logging.getLogger(__name__)
_MESSAGES, _HEARTBEAT, _STORE = 0, 1, 2  # purposes of a connection
_ALIVE, _SHUTDOWN = b"alive", b"shutdown"  # on the connection for heartbeats
_HEARTBEAT_S, _POLL_S = 1.0, 0.1
_GRACE_S = 5.0  # for an error that says more, and the answers to requests that have failed


class ControlChannel:
    """Control connections of one rank.

    Args:
        ranks: of this process.
        startup_message: rank 0's, to every rank that connects; then an attribute of every rank.
        check: raises an EngineError if the other ranks can no longer be expected.
        store_port: of rank 0's store, on its loopback.

    Raises:
        EngineError: not every rank has connected in time.
    """

    def __init__(
        self,
        ranks: Ranks,
        startup_message: bytes = b"",
        check: Callable[[], None] = lambda: None,
        store_port: int = 0,
    ) -> None:
        self._ranks, self.startup_message = ranks, startup_message
        self.store_port = store_port  # or, on another host than rank 0's, a port of its loopback that leads there
        self.lost = ""  # what has happened, once a rank is lost
        self.at_loss: list[Callable[[], object]] = []  # callbacks, called from any thread
        self.is_fatal = True  # whether this process exits soon after a loss
        # By purpose, and the rank at the other end.
        self._connections: dict[int, dict[int, Connection]] = {_MESSAGES: {}, _HEARTBEAT: {}}
        self._listener: Listener | None = None
        self._is_lost, self._is_over, self._is_closed = (threading.Event() for _ in range(3))
        self._is_complete = False
        self._heartbeats = threading.Thread(target=self._exchange_heartbeats, name="heartbeats", daemon=True)
        self._heartbeats.start()
        try:
            self._connect(check)
        except BaseException:
            self.close()
            raise

    def _connect(self, check: Callable[[], None]) -> None:
        """Connect to rank 0, or in rank 0 wait until every other rank has connected."""
        rank, timeout_s = self._ranks.rank, self._ranks.timeout_s
        deadline = time.monotonic() + timeout_s
        if rank == 0:
            self._listen()
        while not (self._has_found_rank_0() if rank else self._has_gathered()):
            check()
            if self.lost or time.monotonic() > deadline:
                late = f"rank 0 has not come within {timeout_s:g} s ({self._ranks.rendezvous})"
                late = late if rank else f"not all have come within {timeout_s:g} s"
                raise EngineError(self.lost or f"rank {rank}: {late}")
            time.sleep(_POLL_S)

    def _listen(self) -> None:
        key = secrets.token_bytes(16)
        host, interface = own_addresses(self._ranks)
        self._listener = Listener(interface, partial(self._accept, key))
        publish_address(self._ranks, host, self._listener.port, key)

    def _accept(self, key: bytes, sock: socket.socket) -> None:
        purpose, rank, connection = welcome(sock, key, self.startup_message)
        if purpose == _STORE:
            forward(socket.create_connection((LOOPBACK, self.store_port)), connection)
        elif self._is_complete or self._is_closed.is_set() or not 0 < rank < self._ranks.world_size:
            connection.close()
        else:  # a rank that has stopped waiting for a handshake connects again
            self._connections[purpose][rank] = connection

    def _has_gathered(self) -> bool:
        self._is_complete = sum(map(len, self._connections.values())) == 2 * (self._ranks.world_size - 1)
        if self._is_complete and self._listener and self._ranks.is_one_host:  # the store is reached without a tunnel
            self._listener.close()
        return self._is_complete

    def _has_found_rank_0(self) -> bool:
        # The file may be missing, unfinished, or an earlier start's, whose port is closed.
        with suppress(OSError, ValueError, KeyError, TypeError):
            address = json.loads(Path(self._ranks.rendezvous).read_text())
            if address["run"] != self._ranks.run:
                return False
            made = [connect(address, self._ranks.rank, purpose) for purpose in (_MESSAGES, _HEARTBEAT)]
            for purpose, (connection, self.startup_message) in enumerate(made):
                self._connections[purpose][0] = connection
            if not self._ranks.is_one_host:
                self._listener = Listener(LOOPBACK, partial(self._tunnel, address))
                self.store_port = self._listener.port
            return True
        return False

    def _tunnel(self, address: dict[str, str], sock: socket.socket) -> None:
        forward(sock, connect(address, self._ranks.rank, _STORE)[0])

    def _exchange_heartbeats(self) -> None:
        next_s, heard_s = 0.0, dict[Connection, float]()
        while not self._is_over.is_set():
            connections, now = self._connections[_HEARTBEAT].copy(), time.monotonic()
            if now >= next_s:
                next_s = now + _HEARTBEAT_S
                for connection in connections.values():
                    with suppress(OSError):  # the loss is seen below
                        connection.send_bytes(_ALIVE)
            try:
                ready = wait(connections.values(), max(0.0, next_s - now))
            except (OSError, ValueError):  # one was closed
                continue
            now = time.monotonic()
            for rank, connection in connections.items():
                if connection in ready:
                    heard_s[connection] = now
                    self._hear(connection, rank)
                elif now - heard_s.setdefault(connection, now) > self._ranks.silence_s:
                    self.report_loss(f"rank {rank} is lost: no heartbeat for {self._ranks.silence_s:g} s")

    def _hear(self, connection: Connection, rank: int) -> None:
        try:
            if connection.recv_bytes() == _SHUTDOWN:
                self._is_over.set()
        except (EOFError, OSError) as error:
            problem = str(error) if isinstance(error, OSError) else "it has hung up"
            self.report_loss(f"rank {rank} is lost: {problem}")

    def report_loss(self, problem: str) -> None:
        """Report a loss, call the callbacks, and exit this process soon if a loss is fatal."""
        if self._is_over.is_set():
            return
        self._is_over.set()  # the first report is the right one
        sys.stderr.write(f"fastertransformer: rank {self._ranks.rank} of {self._ranks.world_size}: {problem}\n")
        sys.stderr.flush()
        self.lost = problem
        self._is_lost.set()
        if self.is_fatal:
            threading.Thread(target=self._end_process, daemon=True).start()
        for act in self.at_loss:
            try:
                act()
            except Exception:  # the other callbacks are called all the same
                _log.exception("rank-loss callback failed")

    def _end_process(self) -> None:
        if not self._is_closed.wait(_GRACE_S):
            os._exit(1)

    def wait_for_loss(self, timeout_s: float = 2.0) -> str:
        """Wait for a report of a loss, for longer than it takes to detect that a process has ended."""
        self._is_lost.wait(timeout_s)
        return self.lost

    def send(self, message: bytes) -> None:
        """Send a message to rank 0, or from rank 0 to all others; raises an OSError if a rank has disconnected."""
        for connection in self._connections[_MESSAGES].values():
            connection.send_bytes(message)

    def receive(self, timeout_s: float | None = None) -> list[bytes]:
        """Wait for the next message of rank 0 (empty: it is the last one), or of each of the other ranks.

        Raises:
            OSError: a rank has disconnected, or has sent nothing in time.
        """
        messages = []
        for connection in self._connections[_MESSAGES].values():
            if timeout_s is not None and not connection.poll(timeout_s):
                raise TimeoutError(f"no message within {timeout_s:g} s")
            try:
                messages.append(connection.recv_bytes())
            except EOFError:
                raise ConnectionError("lost: the other end has hung up") from None
        return messages

    def announce_shutdown(self) -> None:
        """Announce a normal exit, so that the other ranks do not report this one as lost; no message follows."""
        self._is_over.set()
        with suppress(OSError):
            for connection in self._connections[_HEARTBEAT].values():
                connection.send_bytes(_SHUTDOWN)
            self.send(b"")

    def close(self) -> None:
        """Hang up on all ranks."""
        self._is_over.set()
        self._is_closed.set()
        if self._listener:
            self._listener.close()
        connections = [each for purpose in self._connections.values() for each in purpose.copy().values()]
        for connection in connections:
            hang_up(connection)
        if self._heartbeats is not threading.current_thread():
            self._heartbeats.join(_GRACE_S)  # it reads from the connections
        for connection in connections:
            connection.close()
