"""How fast a connection of short frames is read: each is work, and one that sends many shall not delay others."""

from __future__ import annotations

import asyncio
import time

from deployment.guard.events import READ_BYTES, Reading, Why

_MOST_PER_S, _AHEAD_S = 20_000, 0.2
"""Frames and messages; and for how long they may come faster."""
_MANY, _FEW_BYTES = 64, 2048
"""Who has sent more in what was read at a time is read in parts of this size, between which others are served."""
_HEADER_BYTES = 16
"""Of headers, which are as much work as a frame; a setting has fewer."""
MESSAGE, PING = 3, 10
"""As many frames are as much work: a ping mostly for Triton, and so are settings."""


class Pace:
    """Counts what comes over one connection, and has it read later where that is much.

    Attributes:
        count: frames and messages of what was read last.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading, self.count, self._until = reading, 0, 0.0
        reading.most = _FEW_BYTES

    def add_headers(self, size: int) -> None:
        """Count bytes of headers."""
        self.count += size // _HEADER_BYTES

    def keep(self) -> None:
        """Decide when to read on, and how much."""
        count, self.count = self.count, 0
        self._reading.most = _FEW_BYTES if count > _MANY else READ_BYTES
        now = time.monotonic()
        self._until = max(self._until, now) + count / _MOST_PER_S
        if (ahead := self._until - now - _AHEAD_S) > 0:
            self._reading.pause(Why.PACE)
            asyncio.get_running_loop().call_later(ahead, self._reading.resume, Why.PACE)
