"""What describes a checkpoint is small, however large its weights: of hostile files only so much is read."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from handover.errors import CheckpointError
from models import safetensors

DESCRIPTION_BYTES = 40 << 20
"""Most that is read of one file, weights apart; the largest vocabularies have about that."""
_MOST_AXES = 16


class BoundedReader(io.BufferedReader):
    """A file of which only a limited number of bytes is read; seeking is free.

    Args:
        raw: the file beneath.
        where: its place, for the error.
        most_bytes: to be read.

    Raises:
        CheckpointError: on the read that goes beyond.
    """

    def __init__(self, raw: Any, where: str, most_bytes: int = DESCRIPTION_BYTES) -> None:
        super().__init__(raw)
        self._where, self._most_bytes = where, most_bytes
        self._left_bytes = most_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        """Read, and count it."""
        return self._counted(super().read, size)

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line, and count it."""
        return self._counted(super().readline, size)

    def readinto(self, buffer: Any, /) -> int:
        """Read into a buffer, and count it."""
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _counted(self, read: Callable[[int], bytes], size: int | None) -> bytes:
        most = self._left_bytes + 1
        content = read(most if size is None or size < 0 else min(size, most))
        self._left_bytes -= len(content)
        if self._left_bytes < 0:
            raise CheckpointError(
                f"{self._where}: what describes its content takes more than {self._most_bytes >> 20} MiB",
                "a checkpoint's takes far less; it is damaged, or made to exhaust whoever opens it",
            )
        return content


def parse_json(content: bytes, where: str) -> Any:
    """Parse JSON out of a checkpoint.

    Raises:
        CheckpointError: it is none, nested without end, or has a key twice.
    """
    return safetensors.parse_json(content, where, CheckpointError)


def is_shape(sizes: Sequence[int]) -> bool:
    """Whether numbers can be an array's shape, so that they can be multiplied and counted in."""
    return len(sizes) <= _MOST_AXES and all(0 <= size < 1 << 48 for size in sizes)
