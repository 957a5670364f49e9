"""Checksums of a checkpoint's files, taken of what a conversion reads of them anyway.

A checkpoint that nothing proves gets a digest in the manifest. What was read in order counts for it; only what was not
is read once more.
"""

from __future__ import annotations

from collections.abc import Iterable

from handover.digests import BLOCK_BYTES, BlockSums, SummedRange

FileRange = tuple[str, SummedRange]
"""A file's path, without links, and a range of it."""


class ReadSums:
    """Collects the checksums of one process: of every run of bytes that is read without a gap."""

    def __init__(self) -> None:
        self._path, self._start, self._end = "", 0, 0
        self._sums = BlockSums()
        self._ranges: list[FileRange] = []

    def add(self, path: str, content: memoryview, offset: int) -> None:
        """Take note of bytes that were read.

        Args:
            path: of their file, without links.
            content: the bytes.
            offset: of the first in the file.
        """
        if (path, offset) != (self._path, self._end):
            self._finish()
            self._path, self._start, self._end, self._sums = path, offset, offset, BlockSums(offset)
        self._sums.update(content)
        self._end += len(content)

    def taken(self) -> list[FileRange]:
        """Return the ranges since the last time."""
        self._finish()
        ranges, self._ranges = self._ranges, []
        return ranges

    def _finish(self) -> None:
        if self._end - self._start >= BLOCK_BYTES:  # a shorter one seldom has a whole block
            self._ranges.append((self._path, SummedRange(self._start, self._end - self._start, self._sums.sums())))
        self._path, self._start, self._end = "", 0, 0


def by_path(ranges: Iterable[FileRange]) -> dict[str, list[SummedRange]]:
    """Sort ranges by their file."""
    found: dict[str, list[SummedRange]] = {}
    for path, one in ranges:
        found.setdefault(path, []).append(one)
    return found
