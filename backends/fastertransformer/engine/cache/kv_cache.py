"""The KV cache: keys and values of all running sequences, in pages whose addresses never change.

A slot holds one row: a sequence, or one beam of it; the scheduler keeps the rows that decode in the first slots. All
memory that the cache may take is reserved once, in pages of PAGE tokens. A row is allocated all pages that it will ever
need when it starts, and a block table on the device lists them. So nothing is copied when rows start, grow, move or
end; a CUDA graph of a step stays valid; and each row takes the memory that it needs, not that of the longest. The keys
and values of an encoder's output are in pages of the same memory, in a block table of their own.

The token at position p of a row is in its entry p % window: a row with a window keeps the last tokens only, and its
valid entries are the first min(p + 1, window). Rows without one have window UNBOUNDED.

Page 0 belongs to no slot: padding is written there.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..errors import EngineError
from ..request.schema import Array
from .block_table import BlockTable, PagePool
from .sizing import MOST_SLOTS, CacheNeed, CacheShape, upload

PAGE = 32  # tokens
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 has no name for it; this is Linux's number


class KvCache:
    """Keys and values by layer and page.

    Args:
        shape: dimensions.
        device: of the memory and the tables.
        budget_bytes: that the pages may take.
        longest: entries that a row has at most.

    Attributes:
        memory: of each layer, [2 (k, v), pages, H, PAGE, D].
        block_tables: int32, pages of each slot, see BlockTable.on_device.
        source_block_tables: pages of each slot's encoder output; no columns if there is no encoder.
        windows: int64 [MOST_SLOTS], on the device; 1 of a free slot.
        sources: int64 [2, MOST_SLOTS], on the device: the length of each slot's encoder input, 1 of a free slot, and
            its IA3 task, -1 for none.
    """

    def __init__(self, shape: CacheShape, device: torch.device, budget_bytes: int, longest: int) -> None:
        self.shape, self._device = shape, device
        self._page_bytes = PAGE * shape.token_bytes
        pages = max(0, budget_bytes // max(1, shape.token_bytes) // PAGE - 1)
        self.budget_bytes = pages * self._page_bytes
        self.memory = [_zeros(shape, pages + 1, device) for _ in range(shape.layers)]
        self._pool = PagePool(range(1, pages + 1))
        self._own = BlockTable(self._pool, _pages(longest), device)
        self._source = BlockTable(self._pool, _pages(longest) if shape.has_cross else 0, device)
        self.block_tables, self.source_block_tables = self._own.on_device, self._source.on_device
        self.windows = torch.ones(MOST_SLOTS, dtype=torch.long, device=device)
        self.sources = torch.empty(2, MOST_SLOTS, dtype=torch.long, device=device)
        self.clear_sources()

    def clear_sources(self) -> None:
        """Mark the encoder input of every slot as free."""
        self.sources[0], self.sources[1] = 1, -1

    def bytes_of(self, needs: Iterable[CacheNeed]) -> int:
        """Give the bytes that sequences need together."""
        return sum(rows * (_pages(entries) + _pages(source)) for rows, entries, source in needs) * self._page_bytes

    def room(self, slots: slice) -> int:
        """Give the number of entries that the largest of some slots has room for."""
        return PAGE * max(map(len, self._own.owned[slots]))

    def allocate(
        self, first: int, needs: Array, windows: Array, sources: Array, saved: Mapping[int, list[int]]
    ) -> None:
        """Allocate the slots from ``first`` on to new rows, some of which begin with saved pages; see Steps.allocate.

        Raises:
            EngineError: not enough free pages or slots.
        """
        end = first + len(needs)
        counts, others = ([_pages(need) for need in each.tolist()] for each in (needs, sources))
        missing = sum(counts) + sum(others) - sum(map(len, saved.values()))
        if missing > len(self._pool) or end > MOST_SLOTS:
            raise EngineError(
                f"{missing} pages of the KV cache for {end} rows; there are {len(self._pool)}, and {MOST_SLOTS}"
            )
        self._own.allocate(counts, saved)
        self._source.allocate(others, {})
        self.windows[first:end] = upload(windows, self._device)

    def free(self, count: int, kept: int, targets: Array, sources: Array) -> None:
        """Free slots, and move others into the gaps; see Steps.free. Pages change owners, and nothing is copied."""
        moved = dict(zip(targets.tolist(), sources.tolist(), strict=True))
        for table in (self._own, self._source):
            table.free(kept, moved)
        if moved:
            to, of = upload(np.array((targets, sources)), self._device)
            self.windows[to], self.sources[:, to] = self.windows[of], self.sources[:, of]
        self.windows[kept:count] = 1
        self.sources[0, kept:count] = 1

    def copy(self, targets: Array, sources: Array, length: int) -> None:
        """Copy the first ``length`` entries of slots to others; all sources are read before any target is written."""
        both = [self._own.pages_of(each, _pages(length)) + self._source.pages_of(each) for each in (targets, sources)]
        to, of = upload(np.array(both, np.int64), self._device)
        for block in self.memory:
            block[:, to] = block[:, of]
        where = upload(np.array((targets, sources)), self._device)
        self.sources[:, where[0]] = self.sources[:, where[1]]

    def clear(self, slots: Array) -> None:
        """Fill slots with zeros; see _zeros."""
        pages = upload(np.array(self._own.pages_of(slots) + self._source.pages_of(slots)), self._device)
        for block in self.memory:
            block[:, pages] = 0

    def save(self, slot: int, length: int) -> list[int]:
        """Take the first ``length`` entries from a slot that is about to be freed; returns their pages."""
        return self._own.detach(slot, _pages(length))

    def free_saved(self, saved: list[int]) -> None:
        """Free the pages that save returned."""
        self._pool.free(saved)

    def restore(self, slot: int, content: Sequence[Tensor]) -> None:
        """Write a slot's first entries, [2, H, length, D] of each layer."""
        count = _pages(content[0].shape[2]) if content else 0
        if not count:  # a task may have a prefix of no tokens
            return
        pages = upload(np.array(self._own.owned[slot][:count]), self._device)
        for block, entries in zip(self.memory, content, strict=True):
            room = count * PAGE - entries.shape[2]
            padded = F.pad(entries, (0, 0, 0, room)).view(2, entries.shape[1], count, PAGE, -1)
            block[:, pages] = padded.transpose(1, 2)


def _zeros(shape: CacheShape, pages: int, device: torch.device) -> Tensor:
    """Allocate a layer's memory.

    It is zeroed: a masked entry is multiplied by 0, and 0 times a leftover NaN is NaN. A host allocates physical memory
    only when it is written to.
    """
    heads, size = shape.head_num, shape.size_per_head
    if shape.is_head_major:
        return torch.zeros((2, pages, heads, PAGE, size), dtype=shape.dtype, device=device)
    wanted = (2, pages, PAGE, heads, size)
    if device.type != "cpu":
        return torch.zeros(wanted, dtype=shape.dtype, device=device).transpose(2, 3)
    count = 2 * pages * PAGE * heads * size * shape.dtype.itemsize
    try:
        # Not reserved, so that a process may still be forked where this is more than half of the memory.
        content = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except OSError as error:
        raise EngineError(f"{count} bytes of KV cache a layer: {error.strerror}; see kv_cache_bytes") from error
    with suppress(OSError, AttributeError):  # not every host has huge pages
        content.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(content, dtype=shape.dtype).view(wanted).transpose(2, 3)


def _pages(entries: int) -> int:
    return -(-entries // PAGE)
