"""The KV cache: keys and values of all running sequences, in pages whose addresses never change.

A slot holds one row: a sequence, or one beam of it; the scheduler keeps the rows that decode in the first slots. All
memory that the cache may take is reserved once, in pages of PAGE tokens. The page allocator of rank 0 says which pages
a row has (see page_allocator.py), and a page table on each device lists them. So nothing is copied when rows start,
grow, move or end; a CUDA graph of a step stays valid; and each row takes the memory that it needs, not that of the
longest. The keys and values of an encoder's output are in pages of the same memory, in a page table of their own.

The token at position p of a row is in its entry p % window: a row with a window keeps the last tokens only, and its
valid entries are the first min(p + 1, window). Rows without one have window UNBOUNDED.

A draft model keeps its keys and values in the same pages, beside those of the model: so it shares what rows share, and
ends when they end. It has slots of its own. A predictor of the model's own is such a model; what it works on, the
model's output for each token, is kept in the pages too.

Page 0 belongs to no slot: padding is written there, and so are tokens that a context's later tokens do not see once it
has been run, see PageAllocator.unneeded. It is never read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..arrays import MOST_SLOTS, UNBOUNDED, Array, upload
from ..errors import EngineError
from ..large_pages import large_pages
from .fp8_entries import FP8_BYTES, flatten, pack
from .page_allocator import PAGE, PageAllocator, pages_of
from .page_pool import RowPages
from .sizing import CacheNeed, CacheShape, Entry
from .state_pool import StatePool
from .states import States, states_of

__all__ = ["PAGE", "KvCache"]
_UNUSED_BYTES = 1 << 30  # of known pages on a host, and of states: it has other uses for its memory


class KvCache:
    """Keys and values by layer and page.

    Args:
        shape: dimensions.
        device: of the memory and the tables.
        budget_bytes: that the pages may take.
        longest: entries that a row has at most.
        keeps_prefixes: whether rows that begin with the same tokens share pages; see prefix_index.py.
        reach: tokens that a token sees at most, in any layer, itself among them; 0: all before it.
        states: of rows, beside the pages; None: no layer keeps any.

    Attributes:
        allocator: which row has which pages; in use in rank 0 only.
        kv: of each layer, [2 (k, v), pages, H, PAGE, D]; or [1, ...] of vectors from which both are made.
        beside: the same of each layer of a draft model.
        outputs: of the model for each token, behind its final norm or what an EAGLE-3 head makes of its hidden states,
            in one tensor [1, pages, PAGE, hidden]; none: no predictor works on them.
        page_tables: int32 [MOST_SLOTS + 1, most pages of a row], on the device: the pages of each slot, padded with 0.
            The last slot is unused.
        source_page_tables: pages of each slot's encoder output; no columns if there is no encoder.
        windows: int64 [MOST_SLOTS], on the device; 1 of a free slot.
        sources: int64 [2, MOST_SLOTS], on the device: the length of each slot's encoder input, 1 of a free slot, and
            its IA3 task, -1 for none.
        states: see above.
    """

    def __init__(
        self,
        shape: CacheShape,
        device: torch.device,
        budget_bytes: int,
        longest: int,
        keeps_prefixes: bool = True,
        reach: int = 0,
        states: States | None = None,
    ) -> None:
        self.shape, self._device, self.states = shape, device, states
        self._page_bytes = PAGE * shape.token_bytes
        pages = max(0, budget_bytes // max(1, shape.token_bytes) // PAGE - 1)
        self.budget_bytes = pages * self._page_bytes
        self.kv, self.beside = (
            [_zeros(shape, entry, pages + 1, device) for entry in entries] for entries in (shape.layers, shape.beside)
        )
        width, dtype = shape.output
        kept = [_zeros(replace(shape, dtype=dtype), Entry(1, width, 1), pages + 1, device)] if width else []
        self.outputs = [each[:, :, 0] for each in kept]
        most_unused, first_unused, is_on_cpu = pages, pages, device.type == "cpu"
        if is_on_cpu:
            most_unused = min(pages // 2, _UNUSED_BYTES // max(1, self._page_bytes))
            first_unused = pages_of(longest)
        self.allocator = PageAllocator(
            pages,
            most_unused if keeps_prefixes else 0,
            reach,
            first_unused,
            is_on_cpu,
            self._pool(keeps_prefixes, longest) if states else None,
        )
        self._make_slots(pages_of(longest))

    def _make_slots(self, most_pages: int) -> None:
        """Make slots, all free, of rows that have ``most_pages`` at most."""
        device = self._device
        widths = most_pages, most_pages if self.shape.has_cross else 0
        self.page_tables, self.source_page_tables = (
            torch.zeros(MOST_SLOTS + 1, width, dtype=torch.int32, device=device) for width in widths
        )
        self._windows = np.full(MOST_SLOTS, UNBOUNDED, np.int64)  # as on the device, but for free slots
        self.windows = torch.ones(MOST_SLOTS, dtype=torch.long, device=device)
        self.sources = torch.empty(2, MOST_SLOTS, dtype=torch.long, device=device)
        self.clear_sources()

    def _pool(self, keeps_prefixes: bool, longest: int) -> StatePool:
        assert self.states
        most_kept = self.states.count if keeps_prefixes else 0
        if self._device.type == "cpu":
            most_kept = min(most_kept, _UNUSED_BYTES // max(1, self.states.row_bytes))
        return StatePool(self.states.count, most_kept, longest)

    def of_draft_model(self) -> KvCache:
        """Return the draft model's part: its keys and values in the same pages, and slots of its own."""
        part = copy(self)
        part.shape, part.kv, part.beside = replace(self.shape, layers=self.shape.beside, beside=()), self.beside, []
        part.states = None
        part._make_slots(self.page_tables.shape[1])
        return part

    def keep(self, outputs: Tensor, slots: Tensor | slice, positions: Tensor) -> None:
        """Keep the model's outputs, [n, hidden], for tokens of slots at positions, [n] each."""
        self.outputs[0][0][self._places(slots, positions)] = outputs

    def kept(self, slots: Tensor | slice, positions: Tensor) -> Tensor:
        """Return what is kept of tokens; see keep."""
        return self.outputs[0][0][self._places(slots, positions)]

    def _places(self, slots: Tensor | slice, positions: Tensor) -> tuple[Tensor, Tensor]:
        columns = (positions // PAGE).clamp(max=self.page_tables.shape[1] - 1)  # a free slot's position is any
        if isinstance(slots, slice):
            pages = self.page_tables[slots].gather(1, columns[:, None])[:, 0]
        else:
            pages = self.page_tables[slots, columns]
        return pages.long(), positions % PAGE

    def clear_sources(self) -> None:
        """Mark the encoder input of every slot as free."""
        self.sources[0], self.sources[1] = 1, -1

    def bytes_of(self, needs: Iterable[CacheNeed]) -> int:
        """Return the bytes that sequences need together."""
        return sum(rows * (pages_of(entries) + pages_of(source)) for rows, entries, source in needs) * self._page_bytes

    @property
    def most_entries(self) -> int:
        """Entries that a row has room for in its page table."""
        return PAGE * self.page_tables.shape[1]

    @property
    def has_windows(self) -> bool:
        """Whether any row keeps its last tokens only."""
        return bool((self._windows < UNBOUNDED).any())

    def longest(self, first: int, lengths: Array) -> int:
        """Return the most entries that a slot from ``first`` on has once its row has ``lengths`` tokens, int64 [n]."""
        return int(np.minimum(lengths, self._windows[first : first + len(lengths)]).max())

    def allocate(self, first: int, rows: Sequence[RowPages], windows: Array | None = None) -> None:
        """Allocate the slots from ``first`` on to rows whose pages were taken; for a cache that no other rank has."""
        most = np.full(len(rows), UNBOUNDED) if windows is None else windows
        tables, sources = table_of([row.listed for row in rows]), table_of([row.source for row in rows])
        self.place(first, tables, sources, most, states_of(rows))

    def place(self, first: int, tables: Array, sources: Array, windows: Array, states: Array) -> None:
        """Give new rows the slots from ``first`` on, with their page tables and states; see RowSlots.allocate.

        Raises:
            EngineError: not enough slots.
        """
        end = first + len(tables)
        if end > MOST_SLOTS:
            raise EngineError(f"{end} rows in the KV cache; there are {MOST_SLOTS} slots")
        for table, given in ((self.page_tables, tables), (self.source_page_tables, sources)):
            if given.size:
                table[first:end, : given.shape[1]] = upload(given, self._device)
        if self.states:
            self.states.place(first, states)
        self._windows[first:end] = windows
        self.windows[first:end] = upload(windows, self._device)

    def update(self, changes: Array) -> None:
        """Write pages to page tables: slot, column and page of each, int64 [3, n]."""
        slots, columns, pages = upload(changes, self._device)
        self.page_tables[slots, columns] = pages.int()

    def free(self, count: int, kept: int, targets: Array, sources: Array) -> None:
        """Free slots, and move others into the gaps; see Steps.free. Page tables move, and keys and values stay."""
        tables = [self.page_tables, self.source_page_tables]
        if self.states:
            tables.append(self.states.of_slots)
        if len(targets):
            to, of = upload(np.array((targets, sources)), self._device)
            for table in (*tables, self.windows):
                table[to] = table[of]
            self.sources[:, to] = self.sources[:, of]
            self._windows[targets] = self._windows[sources]
        for table in tables:
            table[kept:count] = 0
        self.windows[kept:count] = 1
        self._windows[kept:count] = UNBOUNDED
        self.sources[0, kept:count] = 1

    def copy(self, pages: Array, slots: Array) -> None:
        """Copy pages, and the encoder inputs and states of slots, int64 [2 (target, source), n] each.

        All sources are read before any target is written.
        """
        to, of = upload(pages, self._device)
        for block in (*self.kv, *self.beside, *self.outputs):
            block[:, to] = block[:, of]
        to, of = upload(slots, self._device)
        self.sources[:, to] = self.sources[:, of]
        if self.states:
            self.states.copy_slots(to, of)

    def clear(self, pages: Array) -> None:
        """Fill pages with zeros; see _zeros."""
        cleared = upload(pages, self._device)
        for block in (*self.kv, *self.beside):
            block[:, cleared] = 0

    def restore(self, pages: Array, content: Sequence[Tensor]) -> None:
        """Write a row's first entries, [2, H, length, D] of each layer, to its pages."""
        count = pages_of(content[0].shape[2]) if content else 0
        if not count:  # a task may have a prefix of no tokens
            return
        targets = upload(pages[:count].astype(np.int64), self._device)
        for block, entries in zip(self.kv, content, strict=True):
            kept = pack(entries) if block.dtype == FP8_BYTES else entries
            room = count * PAGE - kept.shape[2]
            padded = F.pad(kept, (0, 0, 0, room)).view(2, kept.shape[1], count, PAGE, -1).transpose(1, 2)
            block[:, targets] = flatten(padded) if block.dtype == FP8_BYTES and self.shape.is_head_major else padded


def table_of(rows: Sequence[Sequence[int]]) -> Array:
    """Put the pages of rows below each other, int32 [rows, most pages of a row], padded with 0."""
    table = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
    for row, pages in enumerate(rows):
        table[row, : len(pages)] = pages
    return table


def _zeros(shape: CacheShape, entry: Entry, pages: int, device: torch.device) -> Tensor:
    """Allocate a layer's memory.

    It is zeroed: a masked entry is multiplied by 0, and 0 times a leftover NaN is NaN. A host allocates physical memory
    only when it is written to.
    """
    heads, size, parts = entry
    if shape.is_head_major:
        return torch.zeros((parts, pages, heads, PAGE, size), dtype=shape.dtype, device=device)
    wanted = (parts, pages, PAGE, heads, size)
    if device.type != "cpu":
        return torch.zeros(wanted, dtype=shape.dtype, device=device).transpose(2, 3)
    if not heads:
        return torch.zeros(wanted, dtype=shape.dtype).transpose(2, 3)
    count = parts * pages * PAGE * heads * size * shape.dtype.itemsize
    try:
        content = large_pages(count)
    except OSError as error:
        raise EngineError(f"{count} bytes of KV cache a layer: {error.strerror}; see kv_cache_bytes") from error
    return content.view(shape.dtype).view(wanted).transpose(2, 3)
