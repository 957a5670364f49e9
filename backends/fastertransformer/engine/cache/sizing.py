"""The dimensions of a KV cache, and how much memory there is for it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

CacheNeed = tuple[int, int, int]  # of a sequence: rows, entries of each row, entries of its encoder's output

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


class Entry(NamedTuple):
    """What a layer keeps of a token.

    Attributes:
        head_num: key and value heads in this process.
        size_per_head: width of one head.
        parts: 2, keys and values; 1: vectors from which both are made.
    """

    head_num: int
    size_per_head: int
    parts: int = 2


NOTHING = Entry(0, 0)
"""What a layer without attention keeps."""


@dataclass(frozen=True)
class CacheShape:
    """Dimensions of one process's cache.

    Attributes:
        layers: what each layer of this process keeps.
        dtype: number format of keys and values.
        has_cross: whether each slot also keeps the keys and values of an encoder's output.
        is_head_major: whether a page has each head's entries side by side, as the kernels read them; else each token's
            heads, so that torch can read a row whose pages are contiguous as one tensor.
        beside: what each layer of a draft model keeps, in the same pages.
        output: width and number format of what the model gives for a token, where that is kept for a predictor.
    """

    layers: tuple[Entry, ...]
    dtype: torch.dtype
    has_cross: bool = False
    is_head_major: bool = False
    beside: tuple[Entry, ...] = ()
    output: tuple[int, torch.dtype] = (0, torch.float32)

    @property
    def token_bytes(self) -> int:
        """Bytes that are kept of one token."""
        kept, (width, dtype) = (*self.layers, *self.beside), self.output
        return sum(parts * heads * size for heads, size, parts in kept) * self.dtype.itemsize + width * dtype.itemsize


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device: of a GPU by its driver, of the host within the limit of this cgroup."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # cached by torch
        return int(torch.cuda.mem_get_info(device)[0] + unused)
    available = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    for line in _MEMINFO.read_text().splitlines() if _MEMINFO.exists() else []:
        if line.startswith("MemAvailable:"):
            available = [int(line.split()[1]) << 10]
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            used = int((_CGROUP / "memory.current").read_text())
            lines = (_CGROUP / "memory.stat").read_text().splitlines()
            counts = {name: int(count) for name, count in (line.split() for line in lines)}
            # The page cache, mapped shards above all, is evicted when memory is needed.
            available.append(int(limit) - used + counts.get("active_file", 0) + counts.get("inactive_file", 0))
    except (OSError, ValueError):
        pass  # no cgroup v2 here
    return max(0, min(available))
