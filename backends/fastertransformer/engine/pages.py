"""Keys and values on a GPU: pages whose addresses never change.

All memory that the cache may take is reserved once, in pages of PAGE tokens. A row takes as many as it will ever need
when it comes, and a table on the device says which they are. So nothing is copied when rows come, grow, move or leave;
a CUDA graph of a step stays valid; and memory goes by what each row needs, not by the longest.

Page 0 belongs to nobody: what padding writes goes there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from .attention import Cells, NextTokens, SlotCells, Slots, biased
from .cache import MOST_SLOTS, CacheShape, KvCache, Need, upload
from .errors import EngineError
from .positions import Bias, Rotary
from .request import Array

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

    def begin(self, memory: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """See Cells."""
        steps = torch.arange(k.shape[2], device=k.device)
        pages = self.tables[:, steps // PAGE].masked_fill(steps >= lengths[:, None], 0)  # [B, T]
        _put(memory, pages, (steps % PAGE).expand_as(pages), k, v)

    def write(self, memory: Tensor, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """See Cells."""
        _put(memory, self.tables.gather(1, cells // PAGE), cells % PAGE, k, v)

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
        shape: of one token and of the layers; without an encoder.
        device: where they live.
        budget_bytes: that the pages may take.
        longest: entries that a row has at most.

    Attributes:
        memory: a layer each: [2 (k, v), pages, H, PAGE, D].
        cross_memory: none.
        tables: int32 [MOST_SLOTS + 1, width], on the device: the pages of each slot; 0 behind its last. Nobody has the
            last slot.
        windows: int64 [MOST_SLOTS], on the device; of a slot that nobody has, 1.
        sources: int64 [MOST_SLOTS, 2], on the device, unused.
    """

    def __init__(self, shape: CacheShape, device: torch.device, budget_bytes: int, longest: int) -> None:
        self.shape, self._device = shape, device
        self._page_bytes = shape.bytes_for(1, PAGE)
        pages = max(0, budget_bytes // max(1, shape.token_bytes) // PAGE - 1)
        self.budget_bytes = pages * self._page_bytes
        size = (2, pages + 1, shape.head_num, PAGE, shape.size_per_head)
        # Zeros, not empty: a masked entry is multiplied by 0, and 0 times a leftover NaN is NaN.
        self.memory = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        self.cross_memory: list[Tensor] = []
        self._free = list(range(pages, 0, -1))
        self._owned: list[list[int]] = []  # by slot
        self._tables = np.zeros((MOST_SLOTS + 1, _pages(longest)), np.int32)
        self.tables = torch.zeros(self._tables.shape, dtype=torch.int32, device=device)
        self.windows = torch.ones(MOST_SLOTS, dtype=torch.long, device=device)
        self.sources = torch.zeros(MOST_SLOTS, 2, dtype=torch.long, device=device)

    def bytes_of(self, needs: Iterable[Need]) -> int:
        """Say what sequences take that are in the cache together."""
        return sum(rows * _pages(entries) for rows, entries, _ in needs) * self._page_bytes

    def bytes_of_saved(self, entries: int) -> int:
        """Say what a row takes that is saved."""
        return _pages(entries) * self._page_bytes

    def place(self, first: int, needs: Array, windows: Array, sources: Array, saved: Mapping[int, Saved]) -> None:
        """Give the slots from ``first`` on to new rows; see KvCache.place.

        Raises:
            EngineError: there are not so many pages left, or slots.
        """
        end = first + len(needs)
        counts = [_pages(need) for need in needs.tolist()]
        missing = sum(counts) - sum(len(each.pages) for each in saved.values())
        if missing > len(self._free) or end > MOST_SLOTS:
            raise EngineError(
                f"{missing} pages of the KV cache for {end} rows; there are {len(self._free)}, and {MOST_SLOTS}"
            )
        for slot, count in enumerate(counts, first):
            pages = saved[slot].pages if slot in saved else []
            self._owned.append(pages + [self._free.pop() for _ in range(count - len(pages))])
        self._announce(first, end)
        self.windows[first:end] = upload(windows, self._device)

    def _announce(self, first: int, end: int) -> None:
        """Tell the device which pages slots have."""
        self._tables[first:end] = 0
        for slot, pages in enumerate(self._owned[first:end], first):
            self._tables[slot, : len(pages)] = pages
        self.tables[first:end] = upload(self._tables[first:end].copy(), self._device)

    def leave(self, count: int, kept: int, targets: Array, sources: Array, length: int) -> None:
        """Free slots; see KvCache.leave. Pages change hands, and nothing is copied."""
        moved = dict(zip(targets.tolist(), sources.tolist(), strict=True))
        stay = set(moved.values())
        for slot, pages in enumerate(self._owned):
            if slot in moved or (slot >= kept and slot not in stay):
                self._free += reversed(pages)
        for target, source in moved.items():
            self._owned[target] = self._owned[source]
        del self._owned[kept:]
        self._announce(min([kept, *moved]), count)
        if moved:
            to, of = upload(np.array((targets, sources)), self._device)
            self.windows[to] = self.windows[of]
        self.windows[kept:count] = 1

    def cells(self, slots: Slots) -> PageCells:
        """Say where rows keep their keys and values."""
        return PageCells(self.tables[slots])

    def copy(self, targets: Array, sources: Array, length: int) -> None:
        """Overwrite slots with what the first ``length`` entries of others hold; all are read before any is written."""
        count = _pages(length)
        both = [[page for slot in slots.tolist() for page in self._owned[slot][:count]] for slots in (targets, sources)]
        to, of = upload(np.array(both), self._device)
        for block in self.memory:
            block[:, to] = block[:, of]

    def wipe(self, slots: Array) -> None:
        """Fill slots with zeros, as new ones are; see __init__."""
        pages = upload(np.array([page for slot in slots.tolist() for page in self._owned[slot]]), self._device)
        for block in self.memory:
            block[:, pages] = 0

    def save(self, slot: int, length: int) -> Saved:
        """Keep the first ``length`` entries of a slot, which is about to leave."""
        count = _pages(length)
        saved = Saved(self._owned[slot][:count], length)
        self._owned[slot] = self._owned[slot][count:]
        return saved

    def forget(self, saved: Saved) -> None:
        """Drop what was saved."""
        self._free += reversed(saved.pages)

    def restore(self, slot: int, content: Sequence[Tensor]) -> None:
        """Begin a slot with entries, [2, H, length, D] a layer."""
        count = _pages(content[0].shape[2]) if content else 0
        if not count:  # a task may have a prefix of no tokens
            return
        pages = upload(np.array(self._owned[slot][:count]), self._device)
        for block, entries in zip(self.memory, content, strict=True):
            room = count * PAGE - entries.shape[2]
            padded = F.pad(entries, (0, 0, 0, room)).view(2, entries.shape[1], count, PAGE, -1)
            block[:, pages] = padded.transpose(1, 2)


def _put(memory: Tensor, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    memory[0, pages, :, offsets] = k.transpose(1, 2)  # indexed axes come first: [B, T, H, D]
    memory[1, pages, :, offsets] = v.transpose(1, 2)


def _joined(pages: Tensor, length: int) -> Tensor:
    """[B, n, H, PAGE, D] -> [B, H, length, D]."""
    return pages.transpose(1, 2).flatten(2, 3)[:, :, :length]


def _pages(entries: int) -> int:
    return -(-entries // PAGE)


Cache = KvCache | PagedCache


def next_tokens(
    positions: Tensor, cells: Cells, windows: Tensor, longest: int, bias: Bias | None, scale: float, like: Tensor
) -> NextTokens | PageTokens:
    """Say how one token of every row attends to its past: on a GPU by a kernel that reads pages where they are."""
    if isinstance(cells, PageCells) and positions.is_cuda:
        return PageTokens(positions, cells.tables, windows, bias, scale)
    return NextTokens(positions, cells, windows, longest, bias, scale, like)


class PageTokens:
    """One token of every row, on a GPU; see attention.NextTokens.

    Attributes:
        rotary: how it turns queries and keys itself; None: they are given as they are to be.
    """

    def __init__(self, positions: Tensor, tables: Tensor, windows: Tensor, bias: Bias | None, scale: float) -> None:
        self._rows = tables, positions, windows, scale, bias.by_distance if bias else None
        self.rotary: Rotary | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        """See attention.NewRows."""
        from .kernels.attention import attend  # needs Triton, which torch for GPUs brings along

        return attend(q, k, v, memory, *self._rows, self.rotary)


class PackedRows:
    """Rows that begin, one behind the other in one row of tokens, so nothing is padded; see attention.NewRows.

    Args:
        tables: int32 [slots, width], pages of all slots; None: a slot is one piece of memory, see attention.SlotCells.
        rows: int64 [T], slot of each token.
        positions: int64 [T].
        ends: int32 [B + 1], on the device: 0, then where each row ends.
        lengths: of the rows, where the host knows them; None: ``ends`` has to do.
        bias: by positions; None: none.
        scale: of q k.
        like: a tensor on the device, in the format of keys.
    """

    def __init__(
        self,
        tables: Tensor | None,
        rows: Tensor,
        positions: Tensor,
        ends: Tensor,
        lengths: list[int] | None,
        bias: Bias | None,
        scale: float,
        like: Tensor,
    ) -> None:
        self._cells, self._positions = SlotCells(rows), positions
        self._pages = None if tables is None else tables[rows, positions // PAGE]
        self._offsets = positions % PAGE
        self._ends, self._lengths, self._scale = ends, lengths, scale
        self._longest = max(lengths) if lengths else len(rows)
        self._masks: list[Tensor | None] = [None] * len(lengths or ())
        if bias and lengths:
            steps = torch.arange(self._longest, device=rows.device)
            mask = biased(steps <= steps[:, None], bias(steps[None], steps[None]), like)
            self._masks = [mask[..., :length, :length] for length in lengths]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        """Keep k and v, [1, H, T, D] each, in a layer's memory, and attend to them."""
        if self._pages is None:  # to its slot a token is a row of its own
            self._cells.write(memory, self._positions[:, None], k.transpose(0, 2), v.transpose(0, 2))
        elif k.is_cuda:
            from .kernels.keep import keep

            keep(k[0], v[0], memory, self._pages, self._offsets)
        else:
            _put(memory, self._pages[None], self._offsets[None], k, v)
        if can_pack(q) and not (self._masks and self._masks[0] is not None):
            parts = [x[0].transpose(0, 1) for x in (q, k, v)]
            ends, longest = self._ends, self._longest
            out = torch.ops.aten._flash_attention_forward(
                *parts, ends, ends, longest, longest, 0.0, True, False, scale=self._scale
            )[0]
            return out.transpose(0, 1)[None]  # type: ignore[no-any-return]
        assert self._lengths, "only the kernel of rows side by side takes lengths from the device"
        out, end = torch.empty_like(q), 0
        for length, mask in zip(self._lengths, self._masks, strict=True):
            own, end = slice(end, end + length), end + length
            row = q[:, :, own], k[:, :, own], v[:, :, own]
            out[:, :, own] = F.scaled_dot_product_attention(*row, mask, is_causal=mask is None, scale=self._scale)
        return out


def can_pack(like: Tensor) -> bool:
    """Say whether torch has a kernel for heads, [..., D], of this format that takes rows side by side."""
    return like.is_cuda and like.dtype != torch.float32 and like.shape[-1] % 8 == 0 and like.shape[-1] <= 256
