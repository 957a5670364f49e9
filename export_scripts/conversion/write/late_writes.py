"""Write to a file that other processes write to: while one of them does, what is ready is kept and work goes on.

The kernel lets one process at a time write to a file; who asks meanwhile keeps a processor busy with waiting.
"""

from __future__ import annotations

from typing import Protocol

from export_scripts.conversion.write.shard_file import write_at

ROOM_BYTES = 2 << 20
"""What a process keeps, at most: some blocks."""


class Turn(Protocol):
    """A lock, held by who writes to a file."""

    def acquire(self, block: bool = True, /) -> bool:
        """Take it; without ``block`` only where it is free."""

    def release(self) -> None:
        """Return it."""


class LateWrites:
    """Writes of one process to a file.

    Args:
        descriptor: of the file.
        turn: shared with the other processes.
        room: memory for what is kept.
    """

    def __init__(self, descriptor: int, turn: Turn, room: memoryview) -> None:
        self._descriptor, self._turn, self._room = descriptor, turn, room
        self._kept: list[tuple[memoryview, int]] = []
        self._used_bytes = 0

    def write(self, content: memoryview, offset: int) -> None:
        """Write a content at its place, after what was kept, or keep a copy of it."""
        end = self._used_bytes + len(content)
        if not self._turn.acquire(end > len(self._room)):
            place = self._room[self._used_bytes : end]
            place[:] = content
            self._kept.append((place, offset))
            self._used_bytes = end
            return
        self._write([*self._kept, (content, offset)])

    def finish(self) -> None:
        """Write all that was kept."""
        if self._kept:
            self._turn.acquire()
            self._write(self._kept)

    def _write(self, contents: list[tuple[memoryview, int]]) -> None:
        try:
            for content, offset in contents:
                write_at(self._descriptor, content, offset)
        finally:
            self._turn.release()
        self._kept, self._used_bytes = [], 0
