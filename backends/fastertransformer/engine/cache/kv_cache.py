"""Keys and values of all sequences in flight: pages whose addresses never change.

A slot belongs to one row: a sequence, or one beam of it; the rows that decode fill the first slots, which is the
scheduler's care. All memory that the cache may take is reserved once, in pages of PAGE tokens. A row takes as many as
it will ever need when it comes, and a table on the device says which they are. So nothing is copied when rows come,
grow, move or leave; a CUDA graph of a step stays valid; and memory goes by what each row needs, not by the longest.
What a decoder keeps of its encoder's output is in pages of the same memory, in a table of its own.

The token at position p of a row is in its entry p % window: a row with a window keeps the last tokens only, and its
valid entries are the first min(p + 1, window). Rows without one have window UNBOUNDED.

Page 0 belongs to nobody: what padding writes goes there.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..errors import EngineError
from ..ops.kernels import can_run_on
from ..request.parse import Array
from .block_table import PagePool, PageTable
from .sizing import MOST_SLOTS, CacheShape, Need, upload

PAGE = 32  # tokens
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.10 has no name for it; this is Linux's number


class KvCache:
    """Keys and values by layer and page.

    Args:
        shape: of one token and of the layers.
        device: where they live.
        budget_bytes: that the pages may take.
        longest: entries that a row has at most.

    Attributes:
        memory: a layer each: [2 (k, v), pages, H, PAGE, D].
        tables: pages of each slot, as PageTable.on_device.
        source_tables: likewise of what the encoder made; without columns where there is none.
        windows: int64 [MOST_SLOTS], on the device; of a slot that nobody has, 1.
        sources: int64 [2, MOST_SLOTS], on the device: the length of what each slot's encoder was given, 1 where there
            is nobody, and the IA3 task, -1 for none.
    """

    def __init__(self, shape: CacheShape, device: torch.device, budget_bytes: int, longest: int) -> None:
        self.shape, self._device = shape, device
        self._page_bytes = PAGE * shape.token_bytes
        pages = max(0, budget_bytes // max(1, shape.token_bytes) // PAGE - 1)
        self.budget_bytes = pages * self._page_bytes
        self.memory = [_zeros(shape, pages + 1, device) for _ in range(shape.layers)]
        self._free = PagePool(range(1, pages + 1))
        self._own = PageTable(self._free, _pages(longest), device)
        self._source = PageTable(self._free, _pages(longest) if shape.has_cross else 0, device)
        self.tables, self.source_tables = self._own.on_device, self._source.on_device
        self.windows = torch.ones(MOST_SLOTS, dtype=torch.long, device=device)
        self.sources = torch.empty(2, MOST_SLOTS, dtype=torch.long, device=device)
        self.forget_sources()

    def forget_sources(self) -> None:
        """Note of every slot that nobody has it."""
        self.sources[0], self.sources[1] = 1, -1

    def bytes_of(self, needs: Iterable[Need]) -> int:
        """Say what sequences take that are in the cache together."""
        return sum(rows * (_pages(entries) + _pages(source)) for rows, entries, source in needs) * self._page_bytes

    def bytes_of_saved(self, entries: int) -> int:
        """Say what a row takes that is saved."""
        return _pages(entries) * self._page_bytes

    def room(self, slots: slice) -> int:
        """Say how many entries the largest of some slots has room for."""
        return PAGE * max(map(len, self._own.owned[slots]))

    def place(self, first: int, needs: Array, windows: Array, sources: Array, saved: Mapping[int, list[int]]) -> None:
        """Give the slots from ``first`` on to new rows.

        Args:
            first: slot; those before it keep what they have.
            needs: int64 [n], entries of each.
            windows: int64 [n].
            sources: int64 [n], entries of what the encoder makes; 0: there is none.
            saved: what some of the slots begin with; see save.

        Raises:
            EngineError: there are not so many pages left, or slots.
        """
        end = first + len(needs)
        counts, others = ([_pages(need) for need in each.tolist()] for each in (needs, sources))
        missing = sum(counts) + sum(others) - sum(map(len, saved.values()))
        if missing > len(self._free) or end > MOST_SLOTS:
            raise EngineError(
                f"{missing} pages of the KV cache for {end} rows; there are {len(self._free)}, and {MOST_SLOTS}"
            )
        self._own.place(counts, saved)
        self._source.place(others, {})
        self.windows[first:end] = upload(windows, self._device)

    def leave(self, count: int, kept: int, targets: Array, sources: Array) -> None:
        """Free slots. Pages change hands, and nothing is copied.

        Args:
            count: slots in use.
            kept: slots in use afterwards.
            targets: int64 [n], slots that others move to.
            sources: int64 [n], those.
        """
        moved = dict(zip(targets.tolist(), sources.tolist(), strict=True))
        for table in (self._own, self._source):
            table.leave(kept, moved)
        if moved:
            to, of = upload(np.array((targets, sources)), self._device)
            self.windows[to], self.sources[:, to] = self.windows[of], self.sources[:, of]
        self.windows[kept:count] = 1
        self.sources[0, kept:count] = 1

    def copy(self, targets: Array, sources: Array, length: int) -> None:
        """Overwrite slots with what the first ``length`` entries of others hold; all are read before any is written."""
        both = [self._own.pages_of(each, _pages(length)) + self._source.pages_of(each) for each in (targets, sources)]
        to, of = upload(np.array(both, np.int64), self._device)
        for block in self.memory:
            block[:, to] = block[:, of]
        where = upload(np.array((targets, sources)), self._device)
        self.sources[:, where[0]] = self.sources[:, where[1]]

    def wipe(self, slots: Array) -> None:
        """Fill slots with zeros, as new ones are; see _zeros."""
        pages = upload(np.array(self._own.pages_of(slots) + self._source.pages_of(slots)), self._device)
        for block in self.memory:
            block[:, pages] = 0

    def save(self, slot: int, length: int) -> list[int]:
        """Keep the first ``length`` entries of a slot, which is about to leave; give the pages that have them."""
        return self._own.hand_over(slot, _pages(length))

    def forget(self, saved: list[int]) -> None:
        """Drop what was saved."""
        self._free.give(saved)

    def restore(self, slot: int, content: Sequence[Tensor]) -> None:
        """Begin a slot with entries, [2, H, length, D] a layer."""
        count = _pages(content[0].shape[2]) if content else 0
        if not count:  # a task may have a prefix of no tokens
            return
        pages = upload(np.array(self._own.owned[slot][:count]), self._device)
        for block, entries in zip(self.memory, content, strict=True):
            room = count * PAGE - entries.shape[2]
            padded = F.pad(entries, (0, 0, 0, room)).view(2, entries.shape[1], count, PAGE, -1)
            block[:, pages] = padded.transpose(1, 2)


class Held:
    """What rows have in their pages, as torch reads it: where it is, if a row's pages are neighbours.

    Each row is attended to on its own, so nothing is copied, and none looks at more than it has; but rows of one length
    that lie evenly apart, as those of one request do, all at once.

    Args:
        tables: int32 [B, width], pages of each row.
        lengths: [B], entries.
    """

    def __init__(self, tables: Tensor, lengths: Tensor) -> None:
        self._lengths: list[int] = lengths.tolist()
        pages = tables[:, : _pages(max(self._lengths))].long()
        steps = PAGE * torch.arange(1, pages.shape[1], device=pages.device)
        is_torn = ((pages.diff() != 1) & (steps < lengths[:, None])).any(1).tolist()
        firsts = (pages[:, 0] * PAGE).tolist()
        self._places: list[int | Tensor] = [
            pages[row, : _pages(length)] if torn else first
            for row, (first, length, torn) in enumerate(zip(firsts, self._lengths, is_torn, strict=True))
        ]
        apart = {after - before for before, after in pairwise(firsts)}
        is_even = len(apart) < 2 and len(set(self._lengths)) == 1 and not any(is_torn) and min(apart, default=1) > 0
        self._even = (firsts[0], min(apart, default=0)) if is_even else None

    def attend(self, q: Tensor, memory: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attend from q, [B, H, 1, D]; the mask's rows, [B, 1 or H, 1, S], are cut to their lengths."""
        if self._even:
            keys, values = _side_by_side(memory, *self._even, len(q), self._lengths[0])
            return F.scaled_dot_product_attention(q, keys, values, mask, scale=scale)
        parts = []
        for row, (query, place, length) in enumerate(zip(torch.split(q, 1), self._places, self._lengths, strict=True)):
            if isinstance(place, int):
                keys, values = _side_by_side(memory, place, 0, 1, length)
            else:
                keys, values = memory[:, place].transpose(1, 2).flatten(2, 3)[:, None, :, :length]
            own = None if mask is None else mask[row : row + 1, ..., :length]
            parts.append(F.scaled_dot_product_attention(query, keys, values, own, scale=scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _side_by_side(memory: Tensor, first: int, apart: int, count: int, length: int) -> Tensor:
    """View entries of rows whose pages are neighbours, [2, count, H, length, D]; see _zeros.

    Args:
        memory: of a layer.
        first: entry of the first row, as the pages have them one behind the other.
        apart: entries from one row to the next.
        count: rows.
        length: of each.
    """
    part, _, head, entry, _ = memory.stride()
    size = (2, count, memory.shape[2], length, memory.shape[4])
    return memory.as_strided(size, (part, apart * entry, head, entry, 1), memory.storage_offset() + first * entry)


def put(memory: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v, [H, T, D], into the pages of their tokens, [T], at these offsets."""
    if can_run_on(k.device):
        from ..ops.kernels.kv_write import keep

        keep(k, v, memory, pages, offsets)
        return
    put_entries(memory, pages * PAGE + offsets, k.transpose(0, 1), v.transpose(0, 1))


def put_entries(memory: Tensor, entries: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v, [T, H, D], into these entries, [T], of all pages one behind the other; not for the kernels."""
    parts = memory.transpose(2, 3).view(2, -1, *k.shape[1:])  # as _zeros has laid it out
    for part, new in zip(parts, (k, v), strict=True):
        part.index_copy_(0, entries, new)


def _zeros(shape: CacheShape, pages: int, device: torch.device) -> Tensor:
    """Make a layer's memory.

    Zeros, not empty: a masked entry is multiplied by 0, and 0 times a leftover NaN is NaN. The kernels want each head's
    entries of a page side by side; others read a row whose pages are neighbours as one piece, so there the entries of
    neighbours follow each other. A host gives what it has when it is written to, not before.
    """
    heads, size = shape.head_num, shape.size_per_head
    if can_run_on(device):
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
