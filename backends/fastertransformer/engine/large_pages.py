"""Memory in pages of 2 MB where the kernel has such pages: what is read whole from them takes half the time (Zen 4)."""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 32 << 20
_LINE = 64  # bytes of the processor's cache
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 has no name for it; this is Linux's number


def large_pages(size_bytes: int) -> Tensor:
    """Return bytes that begin with a large page; the host's memory is taken where they are written to.

    None is reserved, so that a process may still be forked where this is more than half of the memory.

    Raises:
        OSError: there is no room.
    """
    memory = mmap.mmap(-1, size_bytes + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    with suppress(OSError, AttributeError):  # not every host has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    return whole[start : start + size_bytes]


class SharedPages:
    """Large pages that several pieces of memory lie in, one behind another: alone, each has small ones at its ends.

    A chunk of them lives as long as any of its pieces.
    """

    def __init__(self) -> None:
        self._lock, self._left = Lock(), torch.empty(0, dtype=torch.uint8)

    def take(self, size_bytes: int) -> Tensor:
        """Return bytes that begin with a line of the processor's cache; see large_pages."""
        if size_bytes >= _CHUNK:
            return large_pages(size_bytes)
        with self._lock:
            if size_bytes > len(self._left):
                self._left = large_pages(_CHUNK)
            piece, self._left = self._left[:size_bytes], self._left[-(-size_bytes // _LINE) * _LINE :]
        return piece
