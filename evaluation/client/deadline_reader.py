"""A socket that is read until a deadline, however slowly a server sends."""

from __future__ import annotations

import io
import socket
import time
from typing import Any


class Clock:
    """The deadline of the request that a connection is on."""

    def __init__(self) -> None:
        self.until = 0.0

    def left_s(self) -> float:
        """Return the seconds that are left.

        Raises:
            TimeoutError: none are.
        """
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class DeadlineReader(io.RawIOBase):
    """Reads a socket; each read may take what is left until the deadline."""

    def __init__(self, connected: socket.socket, clock: Clock) -> None:
        self._socket, self._clock = connected, clock
        self._file = connected.makefile("rb", buffering=0)  # keeps the socket open while it is read

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what has arrived, or wait for it until the deadline."""
        self._socket.settimeout(self._clock.left_s())
        return self._socket.recv_into(buffer)

    def close(self) -> None:
        """Release the socket."""
        self._file.close()
        super().close()
