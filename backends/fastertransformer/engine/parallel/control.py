"""Control connections between rank 0 and every other rank: messages, heartbeats, and loss detection.

Rank 0 writes its address into a file, for which the others wait (see handshake.py). Each has two connections to rank 0.
One is for messages: they arrive sooner than by a broadcast of gloo's. On the other both ends send a heartbeat every
second. A rank whose heartbeats stop, or that hangs up, is lost, however it ended and whatever the other ranks wait for.
A network that lacks a rank cannot compute, so every process that detects the loss ends. With several hosts, further
connections lead to rank 0's store (see store_tunnel.py).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from ..errors import EngineError
from .handshake import HandshakeListener, connect, hang_up
from .rank import Ranks
from .store_tunnel import StoreTunnel, forward_to

_log = logging.getLogger(__name__)
_MESSAGES, _HEARTBEAT, _STORE = 0, 1, 2  # purposes of a connection
_ALIVE, _SHUTDOWN = b"alive", b"shutdown"  # on the connection for heartbeats
_HEARTBEAT_S, _FIND_POLL_S, _GATHER_POLL_S = 1.0, 0.2, 0.05
_GRACE_S = 5.0  # for an error that says more, and the answers to requests that have failed


class ControlChannel:
    """Control connections of one rank.

    Args:
        ranks: of this process.
        startup_message: rank 0's, to every rank that connects.
        check: raises an EngineError if the other ranks can no longer be expected.
        store_port: of rank 0's store, on its loopback.

    Attributes:
        startup_message: rank 0's.
        lost: what has happened, once a rank is lost; empty before.
        at_loss: callbacks for a loss, called from any thread.
        is_fatal: whether this process exits soon after a loss.

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
        self._ranks, self.startup_message, self.lost, self._store_port = ranks, startup_message, "", store_port
        self.at_loss: list[Callable[[], object]] = []
        self.is_fatal = True
        self._connections: dict[tuple[int, int], Connection] = {}  # by purpose, and the rank at the other end
        self._entrance: HandshakeListener | StoreTunnel | None = None
        self._is_lost, self._is_over, self._is_closed = (threading.Event() for _ in range(3))
        self._is_complete = False
        self._heartbeats = threading.Thread(target=self._exchange_heartbeats, name="heartbeats", daemon=True)
        self._heartbeats.start()
        try:
            (self._find_rank_0 if ranks.rank else self._gather)(check)
        except BaseException:
            self.close()
            raise

    def _gather(self, check: Callable[[], None]) -> None:
        """Wait until every other rank has connected."""
        deadline = time.monotonic() + self._ranks.timeout_s
        listener = self._entrance = HandshakeListener(self._ranks, self.startup_message, self._accept)
        while len(self._connections) < 2 * (self._ranks.world_size - 1):
            check()
            if self.lost or time.monotonic() > deadline:
                raise EngineError(self.lost or f"rank 0: not all have come within {self._ranks.timeout_s:g} s")
            time.sleep(_GATHER_POLL_S)
        self._is_complete = True
        if self._ranks.is_one_host:  # every rank reaches the store on loopback without a tunnel
            listener.close()

    def _accept(self, purpose: int, rank: int, connection: Connection) -> None:
        if purpose == _STORE:
            forward_to(self._store_port, connection)
        elif self._is_complete or self._is_closed.is_set() or not 0 < rank < self._ranks.world_size:
            connection.close()
        else:  # a rank that has stopped waiting for a handshake connects again
            self._connections[purpose, rank] = connection

    def _find_rank_0(self, check: Callable[[], None]) -> None:
        """Connect to rank 0, as soon as it has written its address."""
        deadline = time.monotonic() + self._ranks.timeout_s
        while time.monotonic() < deadline:
            check()
            # The file may be missing, unfinished, or an earlier start's, whose port is closed.
            with suppress(OSError, ValueError, KeyError, TypeError):
                address = json.loads(Path(self._ranks.rendezvous).read_text())
                if address["run"] == self._ranks.run:
                    made = [connect(address, self._ranks.rank, purpose) for purpose in (_MESSAGES, _HEARTBEAT)]
                    for purpose, (connection, self.startup_message) in enumerate(made):
                        self._connections[purpose, 0] = connection
                    if not self._ranks.is_one_host:
                        self._entrance = StoreTunnel(partial(connect, address, self._ranks.rank, _STORE))
                    return
            time.sleep(_FIND_POLL_S)
        rank, timeout_s, file = self._ranks.rank, self._ranks.timeout_s, self._ranks.rendezvous
        raise EngineError(f"rank {rank}: rank 0 has not come within {timeout_s:g} s ({file})")

    @property
    def tunnel_port(self) -> int | None:
        """Port of this host's loopback that leads to rank 0's store; None if all ranks run on one host."""
        return self._entrance.port if isinstance(self._entrance, StoreTunnel) else None

    def _of(self, purpose: int) -> dict[Connection, int]:
        """Give the connections for a purpose, and the rank at the other end of each."""
        return {each: rank for (of, rank), each in list(self._connections.items()) if of == purpose}

    def _exchange_heartbeats(self) -> None:
        next_s, heard_s = 0.0, dict[Connection, float]()
        while not self._is_over.is_set():
            connections, now = self._of(_HEARTBEAT), time.monotonic()
            if now >= next_s:
                next_s = now + _HEARTBEAT_S
                for connection in connections:
                    with suppress(OSError):  # the loss is seen below
                        connection.send_bytes(_ALIVE)
            try:
                ready = wait(list(connections), max(0.0, next_s - now))
            except (OSError, ValueError):  # one was closed
                continue
            now = time.monotonic()
            for connection, rank in connections.items():
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
        """Send a message to rank 0, or from rank 0 to all others.

        Raises:
            OSError: a rank has disconnected.
        """
        for connection in self._of(_MESSAGES):
            connection.send_bytes(message)

    def receive(self, timeout_s: float | None = None) -> list[bytes]:
        """Wait for the next message of rank 0 (empty: it is the last one), or of each of the other ranks.

        Raises:
            OSError: a rank has disconnected, or has sent nothing in time.
        """
        messages = []
        for connection in self._of(_MESSAGES):
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
            for connection in self._of(_HEARTBEAT):
                connection.send_bytes(_SHUTDOWN)
            self.send(b"")

    def close(self) -> None:
        """Hang up on all ranks."""
        self._is_over.set()
        self._is_closed.set()
        if self._entrance:
            self._entrance.close()
        for connection in list(self._connections.values()):
            hang_up(connection)
        if self._heartbeats is not threading.current_thread():
            self._heartbeats.join(_GRACE_S)  # it reads from the connections
        for connection in list(self._connections.values()):
            connection.close()
