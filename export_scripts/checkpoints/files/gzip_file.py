"""A gzipped file that is read from any place: on the first way through it the state of its decompression is noted.

Format: RFC 1952; zlib compares the checksum of each member where its end is reached.
"""

from __future__ import annotations

import io
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GZIP = 31  # zlib's window bits: a gzip header, the largest window
_READ_BYTES = 32 << 10
_SKIP_BYTES = 4 << 20
_STEP_BYTES = 64 << 20


@dataclass(frozen=True)
class Mark:
    """A place to begin at; about 80 KB.

    Attributes:
        offset: in what the file holds.
        file_offset: of the next compressed byte to read.
        waiting: compressed bytes that were read and not used.
        state: of the decompression.
    """

    offset: int
    file_offset: int
    waiting: bytes
    state: Any


class FileOverAnother(io.RawIOBase):
    """A read-only, seekable file over another one, which is closed with it."""

    _file: Any

    def close(self) -> None:
        """Close the file beneath."""
        self._file.close()
        super().close()

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True


class GzipReader(FileOverAnother):
    """What a gzipped file holds, seekable from its start.

    Args:
        path: of the file.
        marks: found so far, in order; readers of one file share them, and add to them.
    """

    def __init__(self, path: Path, marks: list[Mark]) -> None:
        if not marks:
            marks.append(Mark(0, 0, b"", zlib.decompressobj(_GZIP)))
        self._marks = marks
        self._file = path.open("rb", buffering=0)
        self._position = 0
        self._begin(marks[0])

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a position, counted from the start."""
        if whence != os.SEEK_SET or offset < 0:
            raise OSError("a gzipped file has no end to count from")
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        """Read at the position; less than is wanted at the end alone.

        Raises:
            EOFError: the file is truncated.
            zlib.error: it is damaged.
        """
        mark = max((mark for mark in self._marks if mark.offset <= self._position), key=lambda mark: mark.offset)
        if not mark.offset <= self._offset <= self._position:
            self._begin(mark)
        while self._offset < self._position:
            if not self._next(min(self._position - self._offset, _SKIP_BYTES)):
                return 0
        done = 0
        while done < len(buffer) and (content := self._next(len(buffer) - done)):
            buffer[done : done + len(content)] = content
            done += len(content)
        self._position += done
        return done

    def _begin(self, mark: Mark) -> None:
        self._offset, self._waiting, self._state = mark.offset, mark.waiting, mark.state.copy()
        self._file.seek(mark.file_offset)

    def _next(self, most_bytes: int) -> bytes:
        """Decompress some of what follows; empty at the end."""
        while True:
            compressed = self._waiting or self._file.read(_READ_BYTES)
            if self._state.eof:
                compressed = compressed.lstrip(b"\0")  # padding after a member
                if not compressed:
                    return b""
                self._state = zlib.decompressobj(_GZIP)
            elif not compressed:
                raise EOFError("it ends in the middle of its content")
            content: bytes = self._state.decompress(compressed, most_bytes)
            self._waiting = self._state.unused_data if self._state.eof else self._state.unconsumed_tail
            self._offset += len(content)
            if self._offset >= self._marks[-1].offset + _STEP_BYTES and not self._state.eof:
                self._marks.append(Mark(self._offset, self._file.tell(), self._waiting, self._state.copy()))
            if content:
                return content
