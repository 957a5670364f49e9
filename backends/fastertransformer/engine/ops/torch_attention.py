"""Attention in torch: row by row, or for all rows at once if their pages allow it.

B: rows; T: tokens of the call; S: entries of a row; H: heads of queries, Hkv of keys and values; D: size of a head. A
row sees the entries of its own pages within its window, the one that a request has set and the one that the model has
(AttentionSpec.window); other entries of the pages, and padding, are masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..cache.kv_cache import PAGE, KvCache
from ..cache.sizing import UNBOUNDED
from ..model.packed_rows import Rows
from ..model.positions import Attend, AttentionSpec

_MOST_SCORES = 1 << 24  # that are held at a time where they are capped: 64 MiB, and some copies
KvWrite = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, is_causal: bool = False
) -> Tensor:
    """Attend from q, [B, H, T, D], to k and v, [B, Hkv, S, D].

    Args:
        q: queries; head h looks at the key and value head h // (H / Hkv).
        k: keys.
        v: values.
        mask: [B or 1, H or 1, T or 1, S], boolean or added to the scores; None: none.
        spec: scale and cap.
        is_causal: whether a query sees the keys up to its own place only; without a mask, S being T.

    Returns:
        [B, H, T, D].
    """
    if spec.softcap:
        return _attend_capped(q, k, v, mask, spec, is_causal)
    heads, kv_heads = q.shape[1], k.shape[1]
    if heads == kv_heads or q.shape[2] > 1 or (mask is not None and mask.shape[1] > 1):
        is_grouped = heads != kv_heads
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=spec.scale, enable_gqa=is_grouped
        )
    # One token's heads that share a key head are computed as if they were its tokens: no key is read twice.
    grouped = q.reshape(len(q), kv_heads, -1, q.shape[3])
    return F.scaled_dot_product_attention(grouped, k, v, mask, scale=spec.scale).view(q.shape)


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec, is_causal: bool
) -> Tensor:
    """Do what attend_masked does, with scores that are capped: a block of queries at a time, to hold few scores."""
    keys = k.shape[2]
    block = max(1, _MOST_SCORES // (q.shape[0] * q.shape[1] * keys))
    parts = []
    for start in range(0, q.shape[2], block):
        some = q[:, :, start : start + block]
        if is_causal:
            places = torch.arange(keys, device=q.device)
            mask_here: Tensor | None = places <= places[start : start + block, None]
        else:
            mask_here = mask if mask is None or mask.shape[2] == 1 else mask[:, :, start : start + block]
        parts.append(_attend_capped_at_once(some, k, v, mask_here, spec))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _attend_capped_at_once(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    batch, _, length, size = q.shape
    grouped = q.reshape(batch, k.shape[1], -1, length, size)
    scores = (grouped @ k[:, :, None].transpose(3, 4)).flatten(1, 2).float()  # [B, H, T, S]
    scores = spec.softcap * torch.tanh(scores * (spec.scale / spec.softcap))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).to(v.dtype).view(batch, k.shape[1], -1, length, k.shape[2])
    return (weights @ v[:, :, None]).view(q.shape)


def within_rows(
    rows: Rows, spec: AttentionSpec, like: Tensor, is_causal: bool, scores: list[Tensor] | None = None
) -> Callable[..., Tensor]:
    """Prepare attention of packed rows, of known lengths, to themselves; see Ops.encoder_attention."""
    mask: Tensor | None = None
    if spec.bias or 0 < spec.window < rows.longest:
        steps = torch.arange(rows.longest, device=like.device)
        is_seen = (steps <= steps[:, None]) | (not is_causal)
        is_seen &= is_in_window(steps, steps[:, None], spec.window)
        mask = biased(is_seen[None, None], spec.bias(steps[None], steps[None]) if spec.bias else None, like)

    def attend(q: Tensor, k: Tensor, v: Tensor, memory: Tensor | None = None) -> Tensor:
        if is_causal and mask is None and not spec.softcap and has_flash_kernel(q):
            return flash_rows(q, k, v, rows, spec.scale)
        assert rows.lengths, "only the Triton kernels read the lengths on the device"
        out, all_weights = torch.empty_like(q), []
        parts = zip(*(torch.split(each, rows.lengths, 2) for each in (q, k, v, out)), strict=True)
        for length, (query, key, value, target) in zip(rows.lengths, parts, strict=True):
            own = None if mask is None else mask[..., :length, :length]
            if scores is None:
                target[:] = attend_masked(query, key, value, own, spec, is_causal and own is None)
            else:
                products = (query @ key.transpose(2, 3)).float() * spec.scale
                weights = (products if own is None else products + own).softmax(-1)
                target[:] = weights.to(value.dtype) @ value
                all_weights.append(F.pad(weights, (0, rows.longest - length) * 2))
        if scores is not None:
            scores.append(torch.cat(all_weights))
        return out

    return attend


def extend_rows(
    cache: KvCache, rows: Rows, longest: int, spec: AttentionSpec, like: Tensor, kv_write: KvWrite
) -> Attend:
    """Prepare attention of packed rows that continue what their slots hold; see Ops.extend_attention."""
    _, positions, slots, ends, _ = rows
    begins, counts, every = ends[:-1].long(), ends.diff(), torch.arange(len(slots), device=like.device)
    first, starts = slots[begins], positions[begins][:, None]
    windows, steps = cache.windows[first], torch.arange(rows.longest, device=like.device)
    rotate = spec.rotation(positions[None], like)
    # All rows are padded to one length: behind a row's last token, that token is repeated at later positions.
    padded = starts + steps  # [B, n]
    tokens = begins[:, None] + torch.minimum(steps, counts[:, None] - 1)  # [B, n]
    row = torch.searchsorted(ends[1:], every, right=True, out_int32=True)
    origin = row, every - begins[row]
    held = entry_positions(starts[:, 0] - 1, windows, longest)  # [B, S]
    keys, too_old = torch.cat((held, padded), 1), (padded - windows[:, None])[:, :, None]
    is_seen = (keys >= 0)[:, None] & (keys[:, None] > too_old) & (keys[:, None] <= padded[:, :, None])
    is_seen &= is_in_window(keys[:, None], padded[:, :, None], spec.window)
    mask = biased(is_seen[:, None], spec.bias(padded, keys) if spec.bias else None, like)
    entries = positions % cache.windows[slots]
    places = cache.block_tables[slots, entries // PAGE], entries % PAGE
    pages = cache.block_tables[first, : -(-longest // PAGE)]

    def attend(q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        q, k = (rotate(q), rotate(k)) if rotate else (q, k)
        query, *new = (each[0][:, tokens].transpose(0, 1) for each in (q, k, v))  # [B, H, n, D]
        before = (part[pages].transpose(1, 2).flatten(2, 3)[:, :, :longest] for part in memory)
        all_keys, values = (torch.cat(parts, 2) for parts in zip(before, new, strict=True))  # [B, H, S + n, D]
        attended = attend_masked(query, all_keys, values, mask, spec)
        kv_write(memory, *places, k[0], v[0])
        return attended.transpose(1, 2)[origin].transpose(0, 1)[None]

    return attend


def decode_rows(positions: Tensor, tables: Tensor, windows: Tensor, spec: AttentionSpec, like: Tensor) -> Attend:
    """Prepare attention of one token of every row; see Ops.decode_attention."""
    mask: Tensor | None = None
    rotate = spec.rotation(positions[:, None], like)
    entries = positions % windows
    entries = tables.gather(1, (entries // PAGE)[:, None])[:, 0] * PAGE + entries % PAGE
    lengths = torch.minimum(positions + 1, windows)
    view = PagedView(tables, lengths)
    longest = int(lengths.max())
    if spec.bias or 0 < spec.window < longest:
        held = entry_positions(positions, windows, longest)  # [B, S]
        is_seen = (held >= 0) & is_in_window(held, positions[:, None], spec.window)
        bias = spec.bias(positions[:, None], held) if spec.bias else None
        mask = biased(is_seen[:, None, None], bias, like)  # [B, H or 1, 1, S]

    def attend(q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        q, k = (rotate(q), rotate(k)) if rotate else (q, k)
        write_entries(memory, entries, k[:, :, 0], v[:, :, 0])
        return view.attend(q, memory, mask, spec)

    return attend


class PagedView:
    """The entries of rows in the cache as torch reads them: in place, if a row's pages are contiguous.

    Each row has an attention call of its own, so that nothing is copied or padded; but rows of one length at equal
    distances, as those of one request are, are computed in one call.

    Args:
        tables: int32 [B, width], pages of each row.
        lengths: [B], entries.
    """

    def __init__(self, tables: Tensor, lengths: Tensor) -> None:
        self._lengths: list[int] = lengths.tolist()
        pages = tables[:, : -(-max(self._lengths) // PAGE)].long()
        steps = PAGE * torch.arange(1, pages.shape[1], device=pages.device)
        is_torn = ((pages.diff() != 1) & (steps < lengths[:, None])).any(1).tolist()
        firsts = (pages[:, 0] * PAGE).tolist()
        self._places: list[int | Tensor] = [
            pages[row, : -(-length // PAGE)] if torn else first
            for row, (first, length, torn) in enumerate(zip(firsts, self._lengths, is_torn, strict=True))
        ]
        apart = {after - before for before, after in pairwise(firsts)}
        is_even = len(apart) < 2 and len(set(self._lengths)) == 1 and not any(is_torn) and min(apart, default=1) > 0
        self._even = (firsts[0], min(apart, default=0)) if is_even else None

    def attend(self, q: Tensor, memory: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
        """Attend from q, [B, H, 1, D]; the mask's rows, [B, 1 or H, 1, S], are cut to their lengths."""
        if self._even:
            keys, values = _contiguous_entries(memory, *self._even, len(q), self._lengths[0])
            return attend_masked(q, keys, values, mask, spec)
        parts = []
        for row, (query, place, length) in enumerate(zip(torch.split(q, 1), self._places, self._lengths, strict=True)):
            if isinstance(place, int):
                keys, values = _contiguous_entries(memory, place, 0, 1, length)
            else:
                keys, values = memory[:, place].transpose(1, 2).flatten(2, 3)[:, None, :, :length]
            own = None if mask is None else mask[row : row + 1, ..., :length]
            parts.append(attend_masked(query, keys, values, own, spec))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _contiguous_entries(memory: Tensor, first: int, apart: int, count: int, length: int) -> Tensor:
    """View entries of rows whose pages are contiguous, in token-major memory: [2, count, H, length, D].

    The first row begins at the entry ``first``, counted over all pages, the next one ``apart`` entries later.
    """
    part, _, head, entry, _ = memory.stride()
    size = (2, count, memory.shape[2], length, memory.shape[4])
    return memory.as_strided(size, (part, apart * entry, head, entry, 1), memory.storage_offset() + first * entry)


def write_entries(memory: Tensor, entries: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k and v, [T, H, D], to entries, [T], counted over all pages of a layer's token-major memory."""
    parts = memory.transpose(2, 3).view(2, -1, *k.shape[1:])
    for part, new in zip(parts, (k, v), strict=True):
        part.index_copy_(0, entries, new)


def entry_positions(last: Tensor, windows: Tensor, count: int) -> Tensor:
    """Give the position that each of a row's first entries holds once the one at ``last`` is written.

    Args:
        last: [B].
        windows: [B] of the rows' slots.
        count: of entries, S.

    Returns:
        [B, S]; negative: the entry is empty.
    """
    index, window = torch.arange(count, device=last.device), windows[:, None]
    held = last[:, None] - (last[:, None] - index) % window
    return held.masked_fill(index >= window, -1)


def is_in_window(keys: Tensor, queries: Tensor, window: int) -> Tensor:
    """Say which keys a model's window shows to queries, by their positions; 0: all. The shapes are broadcast."""
    return keys > queries - (window or UNBOUNDED)


def biased(is_seen: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
    """Give the attention mask: the bias where a key is seen, minus infinity elsewhere; boolean where there is none."""
    if bias is None:
        return is_seen
    mask = bias.masked_fill(~is_seen, -math.inf).to(like.dtype)
    length = mask.shape[-1]
    # A GPU's attention takes rows that begin at multiples of 16 bytes; others are copied in every layer.
    return F.pad(mask, (0, -length % 8))[..., :length] if mask.is_cuda and length % 8 else mask


def has_flash_kernel(q: Tensor) -> bool:
    """Say whether torch has a flash attention kernel for packed rows of such heads, [..., D]."""
    return q.is_cuda and q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def flash_rows(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float) -> Tensor:
    """Attend causally within packed rows by torch's flash attention kernel, [1, H, T, D] each."""
    parts = [x[0].transpose(0, 1) for x in (q, k, v)]
    ends, longest = rows.ends, rows.longest
    out = torch.ops.aten._flash_attention_forward(*parts, ends, ends, longest, longest, 0.0, True, False, scale=scale)
    return out[0].transpose(0, 1)[None]  # type: ignore[no-any-return]
