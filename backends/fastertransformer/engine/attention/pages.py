"""Keys and values on a GPU: pages whose addresses never change.

All memory that the cache may take is reserved once, in pages of PAGE tokens. A row takes as many as it will ever need
when it comes, and a table on the device says which they are. So nothing is copied when rows come, grow, move or leave;
a CUDA graph of a step stays valid; and memory goes by what each row needs, not by the longest. What a decoder keeps of
its encoder's output is in pages of the same memory, in a table of its own.

Page 0 belongs to nobody: what padding writes goes there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..errors import EngineError
from ..requests.request import Array
from .attention import Slots
from .cache import MOST_SLOTS, CacheShape, KvCache, Need, no_sources, upload
from .tables import PageTable

PAGE = 32  # tokens


class PageCells:
    """Cells of rows whose pages a table gives: memory is [2 (k, v), pages, H, PAGE, D]; see attention.Cells.

    Args:
        tables: int32 [B, width].

    Attributes:
        tables: those.
    """

    def __init__(self, tables: Tensor) -> None:
        self.tables = tables
        self._places: tuple[Tensor, Tensor] | None = None  # page and offset of each token of begin, [B, T]

    def begin(self, memory: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """See Cells; all layers' tokens are equally many."""
        if self._places is None:
            steps = torch.arange(k.shape[2], device=k.device)
            pages = self.tables[:, steps // PAGE].masked_fill(steps >= lengths[:, None], 0)
            self._places = pages, (steps % PAGE).repeat(len(pages), 1)
        put(memory, *self._places, k, v)

    def write(self, memory: Tensor, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """See Cells."""
        put(memory, self.tables.gather(1, cells // PAGE), cells % PAGE, k, v)

    def read(self, memory: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """See Cells."""
        pages = self.tables[:, : _pages(longest)]
        return _joined(memory[0, pages], longest), _joined(memory[1, pages], longest)


@dataclass
class Saved:
    """What a row leaves for later: pages that it hands over, and how many entries they hold."""

    pages: list[int] = field(default_factory=list)
    entries: int = 0


class PagedCache:
    """Keys and values by layer and page; the same as cache.KvCache to those who use it.

    Args:
        shape: of one token and of the layers.
        device: where they live.
        budget_bytes: that the pages may take.
        longest: entries that a row has at most.

    Attributes:
        memory: a layer each: [2 (k, v), pages, H, PAGE, D].
        cross_memory: the same, where there is an encoder.
        tables: pages of each slot, as PageTable.on_device.
        windows: int64 [MOST_SLOTS], on the device; of a slot that nobody has, 1.
        sources: int64 [2, MOST_SLOTS], on the device; see cache.no_sources.
    """

    def __init__(self, shape: CacheShape, device: torch.device, budget_bytes: int, longest: int) -> None:
        self.shape, self._device = shape, device
        self._page_bytes = shape.bytes_for(1, PAGE)
        pages = max(0, budget_bytes // max(1, shape.token_bytes) // PAGE - 1)
        self.budget_bytes = pages * self._page_bytes
        size = (2, pages + 1, shape.head_num, PAGE, shape.size_per_head)
        # Zeros, not empty: a masked entry is multiplied by 0, and 0 times a leftover NaN is NaN.
        self.memory = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        self.cross_memory = self.memory if shape.has_cross else []
        self._free = list(range(pages, 0, -1))
        self._own = PageTable(self._free, _pages(longest), device)
        self._source = PageTable(self._free, _pages(longest) if shape.has_cross else 0, device)
        self.tables = self._own.on_device
        self.windows = torch.ones(MOST_SLOTS, dtype=torch.long, device=device)
        self.sources = no_sources(device)

    def bytes_of(self, needs: Iterable[Need]) -> int:
        """Say what sequences take that are in the cache together."""
        return sum(rows * (_pages(entries) + _pages(source)) for rows, entries, source in needs) * self._page_bytes

    def bytes_of_saved(self, entries: int) -> int:
        """Say what a row takes that is saved."""
        return _pages(entries) * self._page_bytes

    def place(self, first: int, needs: Array, windows: Array, sources: Array, saved: Mapping[int, Saved]) -> None:
        """Give the slots from ``first`` on to new rows; see KvCache.place.

        Raises:
            EngineError: there are not so many pages left, or slots.
        """
        end = first + len(needs)
        counts, others = ([_pages(need) for need in each.tolist()] for each in (needs, sources))
        missing = sum(counts) + sum(others) - sum(len(each.pages) for each in saved.values())
        if missing > len(self._free) or end > MOST_SLOTS:
            raise EngineError(
                f"{missing} pages of the KV cache for {end} rows; there are {len(self._free)}, and {MOST_SLOTS}"
            )
        self._own.place(counts, {slot: each.pages for slot, each in saved.items()})
        self._source.place(others, {})
        self.windows[first:end] = upload(windows, self._device)

    def leave(self, count: int, kept: int, targets: Array, sources: Array, length: int) -> None:
        """Free slots; see KvCache.leave. Pages change hands, and nothing is copied."""
        moved = dict(zip(targets.tolist(), sources.tolist(), strict=True))
        for table in (self._own, self._source):
            table.leave(kept, moved)
        if moved:
            to, of = upload(np.array((targets, sources)), self._device)
            self.windows[to], self.sources[:, to] = self.windows[of], self.sources[:, of]
        self.windows[kept:count] = 1
        self.sources[0, kept:count] = 1

    def cells(self, slots: Slots) -> PageCells:
        """Say where rows keep their keys and values."""
        return PageCells(self.tables[slots])

    def source_cells(self, slots: Slots) -> PageCells:
        """Say where rows keep those of what the encoder has made."""
        return PageCells(self._source.on_device[slots])

    def source_places(self, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Say where that of tokens is, [T] each: page and offset, [1, T] each."""
        return self._source.on_device[slots, positions // PAGE][None], (positions % PAGE)[None]

    def copy(self, targets: Array, sources: Array, length: int) -> None:
        """Overwrite slots with what the first ``length`` entries of others hold; all are read before any is written."""
        both = [self._own.pages_of(each, _pages(length)) + self._source.pages_of(each) for each in (targets, sources)]
        to, of = upload(np.array(both, np.int64), self._device)
        for block in self.memory:
            block[:, to] = block[:, of]
        where = upload(np.array((targets, sources)), self._device)
        self.sources[:, where[0]] = self.sources[:, where[1]]

    def wipe(self, slots: Array) -> None:
        """Fill slots with zeros, as new ones are; see __init__."""
        pages = upload(np.array(self._own.pages_of(slots) + self._source.pages_of(slots)), self._device)
        for block in self.memory:
            block[:, pages] = 0

    def save(self, slot: int, length: int) -> Saved:
        """Keep the first ``length`` entries of a slot, which is about to leave."""
        return Saved(self._own.hand_over(slot, _pages(length)), length)

    def forget(self, saved: Saved) -> None:
        """Drop what was saved."""
        self._free += reversed(saved.pages)

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


def put(memory: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v, [B, H, T, D], into the pages of their tokens, [B, T], at these offsets."""
    if k.is_cuda:
        from ..kernels.keep import keep

        keys, values = (each.transpose(0, 1).flatten(1, 2) for each in (k, v))  # [H, B * T, D]
        keep(keys, values, memory, pages.flatten(), offsets.flatten())
        return
    memory[0, pages, :, offsets] = k.transpose(1, 2)  # indexed axes come first: [B, T, H, D]
    memory[1, pages, :, offsets] = v.transpose(1, 2)


def _joined(pages: Tensor, length: int) -> Tensor:
    """[B, n, H, PAGE, D] -> [B, H, length, D]."""
    return pages.transpose(1, 2).flatten(2, 3)[:, :, :length]


def _pages(entries: int) -> int:
    return -(-entries // PAGE)


Cache = KvCache | PagedCache
