"""Attention in torch to what the cache holds: of rows that go on, and of rows that decode.

B: rows; T: tokens of the call; S: entries of a row; H: heads of queries, Hkv of keys and values; D: size of a head. A
row sees the entries of its own pages within its window, the one that a request has set and the one that the model has
(AttentionSpec.window); other entries of the pages, and padding, are masked. Pages before a model's window are not
looked at: the row may have given them back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.fp8_entries import FP8_BYTES, pack, restore_entries, unpack
from ..cache.kv_cache import KvCache
from ..cache.page_allocator import PAGE
from .linear import HeadNorms, Norm
from .packed_rows import Rows
from .positions import Attend, AttentionSpec
from .torch_attention import KvWrite, attend_masked, biased

WithoutNorms = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]  # an Attend that takes none
_MOST_MASKED = 1 << 24  # queries times keys whose mask is held at a time: 16 MiB, and 64 as fp32


def extend_rows(
    cache: KvCache, rows: Rows, longest: int, spec: AttentionSpec, like: Tensor, kv_write: KvWrite
) -> WithoutNorms:
    """Prepare attention of packed rows that continue what their slots hold; see Ops.extend_attention."""
    _, positions, slots, ends, *_ = rows
    begins, counts, every = ends[:-1].long(), ends.diff(), torch.arange(len(slots), device=like.device)
    first, starts = slots[begins], positions[begins][:, None]
    windows, steps = cache.windows[first], torch.arange(rows.longest, device=like.device)
    rotate = spec.rotation(positions[None], like)
    # All rows are padded to one length: after a row's last token, that token is repeated at later positions.
    padded = starts + steps  # [B, n]
    tokens = begins[:, None] + torch.minimum(steps, counts[:, None] - 1)  # [B, n]
    row = torch.searchsorted(ends[1:], every, right=True, out_int32=True)
    origin = row, every - begins[row]
    columns, held = _entries_in_reach(starts[:, 0], windows, longest, spec, cache.has_windows)
    keys, size = torch.cat((held, padded), 1), max(1, _MOST_MASKED // (len(starts) * (held.shape[1] + rows.longest)))

    def mask_of(part: slice) -> Tensor:
        """Return the mask of some of the new tokens, [B, H or 1, n, S]."""
        queries = padded[:, part, None]
        is_seen = (keys >= 0)[:, None] & (keys[:, None] > queries - windows[:, None, None]) & (keys[:, None] <= queries)
        if spec.reach:
            is_seen &= keys[:, None] >= spec.first_seen(queries)
        return biased(is_seen[:, None], spec.bias(padded[:, part], keys) if spec.bias else None, like)

    parts = [slice(start, start + size) for start in range(0, rows.longest, size)]
    masks = [mask_of(part) for part in parts] if len(parts) == 1 else []  # else every layer makes them, one at a time
    entries = positions % cache.windows[slots]
    tokens_pages, offsets = cache.page_tables[slots, entries // PAGE], entries % PAGE
    pages = cache.page_tables[first[:, None], columns]

    def attend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k = (rotate(q), rotate(k)) if rotate else (q, k)
        query, *new = (each[0][:, tokens].transpose(0, 1) for each in (q, k, v))  # [B, H, n, D]
        held = (restore_entries(part[pages]) if cache.shape.is_head_major else part[pages] for part in kv)
        before = (unpack(part, q.dtype).transpose(1, 2).flatten(2, 3) for part in held)  # [B, H, S, D]
        parts_of = [torch.cat(both, 2) for both in zip(before, new, strict=False)]  # [B, H, S + n, D]
        all_keys, values = parts_of[0], parts_of[-1]
        attended = torch.cat(
            [
                attend_masked(
                    query[:, :, part], all_keys, values, masks[0] if masks else mask_of(part), spec, sinks=sinks
                )
                for part in parts
            ],
            2,
        )
        kv_write(kv, tokens_pages, offsets, k[0], v[0])
        return attended.transpose(1, 2)[origin].transpose(0, 1)[None]

    return attend


def decode_rows(
    positions: Tensor,
    tables: Tensor,
    windows: Tensor,
    spec: AttentionSpec,
    like: Tensor,
    norm: Callable[[Tensor, Norm], Tensor],
) -> Attend:
    """Prepare attention of one token of every row; see Ops.decode_attention."""
    mask: Tensor | None = None
    rotate = spec.rotation(positions[:, None], like)
    entries = positions % windows
    entries = tables.gather(1, (entries // PAGE)[:, None])[:, 0] * PAGE + entries % PAGE
    lengths = torch.minimum(positions + 1, windows)
    first = spec.first_seen(positions)
    # Of a row that overwrites its first entries, all are looked at.
    begins = torch.where(positions < windows, first // PAGE * PAGE, 0)
    view = PagedView(tables, lengths, begins)
    longest = int((lengths - begins).max())
    if spec.bias or bool((first > begins).any()):
        held = entry_positions(positions, windows, longest, begins)  # [B, S]
        is_seen = (held >= 0) & (held >= first[:, None])
        bias = spec.bias(positions[:, None], held) if spec.bias else None
        mask = biased(is_seen[:, None, None], bias, like)  # [B, H or 1, 1, S]

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: Tensor,
        norms: HeadNorms | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if norms:
            q, k = norm(q, norms.query), norm(k, norms.key)
        q, k = (rotate(q), rotate(k)) if rotate else (q, k)
        write_entries(kv, entries, k[:, :, 0], v[:, :, 0])
        return view.attend(q, kv, mask, spec, sinks)

    return attend


class _Run(NamedTuple):
    """Rows after each other whose entries are views of the cache: of one length, and at equal distances.

    Attributes:
        rows: of the call.
        first: entry that the first row begins with, counted over all pages.
        apart: entries from one row's first to the next one's.
        length: entries of each row.
    """

    rows: slice
    first: int
    apart: int
    length: int

    def with_next(self, first: int, length: int) -> _Run | None:
        """Return the run with the next row, or None if that is not one of it."""
        count = self.rows.stop - self.rows.start
        apart = self.apart if count > 1 else first - self.first
        if length != self.length or apart <= 0 or first != self.first + count * apart:
            return None
        return _Run(slice(self.rows.start, self.rows.stop + 1), self.first, apart, length)


class _Torn(NamedTuple):
    """A row whose pages are apart, so that they are copied.

    Attributes:
        rows: of the call; one.
        pages: int64 [n].
        length: entries.
    """

    rows: slice
    pages: Tensor
    length: int


class PagedView:
    """The entries of rows in the cache as torch reads them: in place, if a row's pages are contiguous.

    Each row has an attention call of its own, so that nothing is copied or padded; but rows of one length at equal
    distances, as those are that joined the batch together, are computed in one call.

    Args:
        tables: int32 [B, width], pages of each row.
        lengths: [B], entries.
        begins: [B], entries at the beginning of each row that are not looked at, whole pages; None: there are none.
    """

    def __init__(self, tables: Tensor, lengths: Tensor, begins: Tensor | None = None) -> None:
        pages = tables[:, : -(-int(lengths.max()) // PAGE)].long()
        begins = torch.zeros_like(lengths) if begins is None else begins
        steps = PAGE * torch.arange(1, pages.shape[1], device=pages.device)
        is_behind = (steps < lengths[:, None]) & (steps > begins[:, None])
        is_torn: list[bool] = ((pages.diff() != 1) & is_behind).any(1).tolist()
        columns: list[int] = (begins // PAGE).tolist()
        firsts: list[int] = (pages.gather(1, (begins // PAGE)[:, None])[:, 0] * PAGE).tolist()
        self._parts: list[_Run | _Torn] = []
        for row, length in enumerate((lengths - begins).tolist()):
            if is_torn[row]:
                own = pages[row, columns[row] : columns[row] - (-length // PAGE)]
                self._parts.append(_Torn(slice(row, row + 1), own, length))
                continue
            before = self._parts[-1] if self._parts else None
            longer = before.with_next(firsts[row], length) if isinstance(before, _Run) else None
            if longer:
                self._parts[-1] = longer
            else:
                self._parts.append(_Run(slice(row, row + 1), firsts[row], 0, length))

    def attend(
        self, q: Tensor, kv: Tensor, mask: Tensor | None, spec: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        """Attend from q, [B, H, 1, D]; the mask's rows, [B, 1 or H, 1, S], are cut to their lengths."""
        attended = []
        for part in self._parts:
            rows = part.rows
            if isinstance(part, _Run):
                seen = _contiguous_entries(kv, part.first, part.apart, rows.stop - rows.start, part.length)
            else:
                seen = kv[:, part.pages].transpose(1, 2).flatten(2, 3)[:, None, :, : part.length]
            seen, own = unpack(seen, q.dtype), None if mask is None else mask[rows, ..., : part.length]
            attended.append(attend_masked(q[rows], seen[0], seen[-1], own, spec, sinks=sinks))
        return attended[0] if len(attended) == 1 else torch.cat(attended)


def _contiguous_entries(kv: Tensor, first: int, apart: int, count: int, length: int) -> Tensor:
    """View entries of rows whose pages are contiguous, in a token-major cache: [parts, count, H, length, D].

    The first row begins at the entry ``first``, counted over all pages, the next one ``apart`` entries later.
    """
    part, _, head, entry, _ = kv.stride()
    size = (len(kv), count, kv.shape[2], length, kv.shape[4])
    return kv.as_strided(size, (part, apart * entry, head, entry, 1), kv.storage_offset() + first * entry)


def write_entries(kv: Tensor, entries: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v, [T, H, D], to entries, [T], counted over all pages of a layer's token-major cache.

    Where one vector stands for both, it is k.
    """
    both = (pack(k), pack(v)) if kv.dtype == FP8_BYTES else (k, v)
    parts = kv.transpose(2, 3).view(len(kv), -1, *both[0].shape[1:])
    for part, new in zip(parts, both, strict=False):
        part.index_copy_(0, entries, new)


def _entries_in_reach(
    starts: Tensor, windows: Tensor, longest: int, spec: AttentionSpec, has_rings: bool
) -> tuple[Tensor, Tensor]:
    """Return the columns of rows' page tables, [B, n], that tokens from ``starts``, [B], on see, and what they hold.

    Of a row's pages only those with entries are among them: others may hold numbers that are not finite.

    Args:
        starts: positions.
        windows: [B], of the rows' slots.
        longest: entries that a row has at most.
        spec: the model's window, or chunks.
        has_rings: whether any slot has a window.

    Returns:
        int64 [B, n], and the position that each of their entries holds, [B, n * PAGE]; negative: none that is seen.
    """
    count = -(-longest // PAGE)
    begins = torch.zeros_like(starts)
    if reach := spec.reach:
        begins = torch.where(starts < windows, spec.first_seen(starts) // PAGE, 0)
        count = count if has_rings else min(count, reach // PAGE + 2)
    columns = begins[:, None] + torch.arange(count, device=starts.device)
    last = (torch.minimum(starts, windows) - 1).clamp(min=0) // PAGE
    held = entry_positions(starts - 1, windows, count * PAGE, begins * PAGE)
    return torch.minimum(columns, last[:, None]), held


def entry_positions(last: Tensor, windows: Tensor, count: int, first: Tensor | None = None) -> Tensor:
    """Return the position that each of some entries of a row holds once the one at ``last`` is written.

    Args:
        last: [B].
        windows: [B] of the rows' slots.
        count: of entries, S.
        first: [B], the first of these entries; None: the row's first.

    Returns:
        [B, S]; negative: the entry is empty.
    """
    index, window = torch.arange(count, device=last.device), windows[:, None]
    if first is not None:
        index = index + first[:, None]
    held = last[:, None] - (last[:, None] - index) % window
    return held.masked_fill(index >= window, -1)
