"""A control channel between two supervisors: messages, and a heartbeat every second. Standard library only."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from deployment.processes.stopped import STOPPED_S

_HEARTBEAT_S = 1.0
_LONGEST_LOOK_S = 1.5
"""Longest time between two looks that counts: this process may have been stopped too, as by scontrol suspend."""
_HEARTBEAT = b""


class Channel:
    """One end of it.

    Args:
        connection: over which both ends have proved who they are; it is closed with the channel.

    Attributes:
        lost: why the other end is lost; empty: it is there.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._messages: deque[dict[str, Any]] = deque()
        self._is_closed, self.lost = False, ""
        self._thread = threading.Thread(target=self._run, name="control channel", daemon=True)
        self._thread.start()

    @property
    def own_address(self) -> str:
        """Address of this host by which the other end is reached, and reaches it."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            return str(own.getsockname()[0])

    def send(self, **message: Any) -> None:
        """Send a message; that the other end is lost is seen by who receives."""
        self._send(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None where none is there."""
        return self._messages.popleft() if self._messages else None

    def wait_until_lost(self, timeout_s: float) -> None:
        """Wait until the other end has hung up, but no longer than that."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Hang up."""
        self._is_closed = True
        self._thread.join(2 * _HEARTBEAT_S)
        with self._lock:
            self._connection.close()

    def _send(self, content: bytes) -> None:
        with self._lock, suppress(OSError):
            self._connection.send_bytes(content)

    def _run(self) -> None:
        silent_s, looked, next_s = 0.0, time.monotonic(), 0.0
        while not self._is_closed and not self.lost:
            if looked >= next_s:
                next_s = looked + _HEARTBEAT_S
                self._send(_HEARTBEAT)
            try:
                is_heard = self._connection.poll(_HEARTBEAT_S)
                content = self._connection.recv_bytes() if is_heard else _HEARTBEAT
            except (OSError, EOFError):
                self.lost = "it has hung up"
                return
            now = time.monotonic()
            silent_s, looked = 0.0 if is_heard else silent_s + min(now - looked, _LONGEST_LOOK_S), now
            if content:
                self._messages.append(json.loads(content))
            if silent_s > STOPPED_S:
                self.lost = f"no heartbeat for {STOPPED_S:g} s"
