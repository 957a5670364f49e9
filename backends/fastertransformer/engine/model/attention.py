"""Attention, by what a call's tokens are to their rows: each kind once, with the kernels of a GPU or with torch.

B: rows; T: tokens of the call; S: entries that a row looks at; H: heads; D: size of a head.

A decoder's tokens are kept in the pages of their rows (pages.py) and see what the row has there, as far as its window
goes. What else is in the pages, and what padding has left there, is never seen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..cache.kv_cache import PAGE, Held, KvCache, put, put_entries
from ..ops.kernels import can_run_on
from .packed_rows import Rows
from .positions import Bias, Rotary, Rotation


class Manner(NamedTuple):
    """How a stack attends.

    Attributes:
        scale: of q k.
        bias: by positions; None: none.
        rotary: how queries and keys are turned; None: they are not.
    """

    scale: float
    bias: Bias | None = None
    rotary: Rotary | None = None

    def turning(self, positions: Tensor, like: Tensor) -> Rotation | None:
        """Say how torch turns queries and keys of tokens at positions, [B or 1, T]."""
        return Rotation(positions, self.rotary, like.dtype) if self.rotary else None


class WholeRows:
    """Rows one behind the other, each of which sees itself: all of it, as an encoder does.

    Args:
        rows: those.
        manner: how to attend.
        like: a tensor on the device, in the format of keys.
        kept: takes what each call's queries attend to, fp32 [B, H, S, S]; None: nobody asks.
    """

    _is_causal = False

    def __init__(self, rows: Rows, manner: Manner, like: Tensor, kept: list[Tensor] | None = None) -> None:
        self._rows, self._manner, self._kept = rows, manner, kept
        self._has_kernels, self._mask = can_run_on(like.device), None
        if self._has_kernels:
            from ..ops.kernels.prefill_attention import PackedRows  # needs Triton, which torch for GPUs brings along

            self._packed = PackedRows(rows.ends, len(rows.ids), rows.longest)
        if manner.bias and (kept is not None or not self._has_kernels):
            steps = torch.arange(rows.longest, device=like.device)
            is_seen = (steps <= steps[:, None]) | (not self._is_causal)
            self._mask = biased(is_seen, manner.bias(steps[None], steps[None]), like)  # [1, H, S, S]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor | None = None) -> Tensor:
        """Attend from q to k and v, [1, H, T, D] each."""
        scale, bias = self._manner.scale, self._manner.bias
        # Ours is faster than torch's kernel, but for short rows of wide heads.
        is_ours = self._has_kernels and (q.shape[-1] <= 128 or self._rows.longest > 512)
        if self._is_causal and bias is None and can_pack(q) and not is_ours:
            parts = [x[0].transpose(0, 1) for x in (q, k, v)]
            ends, longest = self._rows.ends, self._rows.longest
            out = torch.ops.aten._flash_attention_forward(
                *parts, ends, ends, longest, longest, 0.0, True, False, scale=scale
            )[0]
            return out.transpose(0, 1)[None]  # type: ignore[no-any-return]
        if self._has_kernels and self._kept is None:
            from ..ops.kernels.prefill_attention import attend_rows

            table = bias.by_offset if bias else None
            return attend_rows(q[0], k[0], v[0], self._packed, scale, table, is_causal=self._is_causal)[None]
        return self._one_by_one(q, k, v)

    def _one_by_one(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend row by row, with torch."""
        lengths = self._rows.lengths
        assert lengths, "only the kernels take lengths from the device"
        out, kept = torch.empty_like(q), []
        rows = zip(*(torch.split(each, lengths, 2) for each in (q, k, v, out)), strict=True)
        for length, (query, key, value, place) in zip(lengths, rows, strict=True):
            mask, scale = None if self._mask is None else self._mask[..., :length, :length], self._manner.scale
            if self._kept is None:
                is_causal = self._is_causal and mask is None
                place[:] = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)
            else:
                scores = (query @ key.transpose(2, 3)).float() * scale
                weights = (scores if mask is None else scores + mask).softmax(-1)
                place[:] = weights.to(value.dtype) @ value
                kept.append(F.pad(weights, (0, self._rows.longest - length) * 2))
        if self._kept is not None:
            self._kept.append(torch.cat(kept))
        return out


class NewRows(WholeRows):
    """Rows that begin, one behind the other: each token sees what comes before it in its row, and is kept.

    Args:
        cache: where.
        rows: see WholeRows.
        manner: likewise.
        like: likewise.
    """

    _is_causal = True

    def __init__(self, cache: KvCache, rows: Rows, manner: Manner, like: Tensor) -> None:
        super().__init__(rows, manner, like)
        self._places = cache.tables[rows.slots, rows.positions // PAGE], rows.positions % PAGE
        self._turn = None if self._has_kernels else manner.turning(rows.positions[None], like)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor | None = None) -> Tensor:
        """Keep k and v, [1, H, T, D] each, in a layer's memory, and attend to them."""
        assert memory is not None
        if self._has_kernels and self._manner.rotary:
            from ..ops.kernels.kv_write import turn_and_keep

            where = memory, *self._places, self._rows.positions
            q, k = (each[None] for each in turn_and_keep(q[0], k[0], v[0], *where, self._manner.rotary))
        else:
            q, k = (self._turn(q), self._turn(k)) if self._turn else (q, k)
            put(memory, *self._places, k[0], v[0])
        return super().__call__(q, k, v)


class ContinuedRows:
    """Rows that go on from what their slots hold, several tokens at a time, one row behind the other.

    Args:
        cache: holds what they go on from.
        rows: see WholeRows; none has more tokens than its window, and their lengths are known.
        longest: at least the entries that a row has in use.
        manner: how to attend.
        like: a tensor on the device, in the format of keys.
    """

    def __init__(self, cache: KvCache, rows: Rows, longest: int, manner: Manner, like: Tensor) -> None:
        _, positions, slots, ends, _ = rows
        begins, counts, every = ends[:-1].long(), ends.diff(), torch.arange(len(slots), device=like.device)
        first, starts = slots[begins], positions[begins][:, None]
        windows, steps = cache.windows[first], torch.arange(rows.longest, device=like.device)
        self._scale, self._turn = manner.scale, manner.turning(positions[None], like)
        # For all rows at once they are padded: behind a row's last token that one stands again, as a later one.
        padded = starts + steps  # [B, n]
        self._tokens = begins[:, None] + torch.minimum(steps, counts[:, None] - 1)  # [B, n]
        row = torch.searchsorted(ends[1:], every, right=True, out_int32=True)
        self._origin = row, every - begins[row]
        held = cell_positions(starts[:, 0] - 1, windows, longest)  # [B, S]
        keys, too_old = torch.cat((held, padded), 1), (padded - windows[:, None])[:, :, None]
        is_seen = (keys >= 0)[:, None] & (keys[:, None] > too_old) & (keys[:, None] <= padded[:, :, None])
        self._mask = biased(is_seen[:, None], manner.bias(padded, keys) if manner.bias else None, like)
        entries = positions % cache.windows[slots]
        self._places = cache.tables[slots, entries // PAGE], entries % PAGE
        self._pages, self._longest = cache.tables[first, : -(-longest // PAGE)], longest

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        """See NewRows."""
        q, k = (self._turn(q), self._turn(k)) if self._turn else (q, k)
        query, *new = (each[0][:, self._tokens].transpose(0, 1) for each in (q, k, v))  # [B, H, n, D]
        held = (part[self._pages].transpose(1, 2).flatten(2, 3)[:, :, : self._longest] for part in memory)
        keys, values = (torch.cat(parts, 2) for parts in zip(held, new, strict=True))  # [B, H, S + n, D]
        attended = F.scaled_dot_product_attention(query, keys, values, self._mask, scale=self._scale)
        put(memory, *self._places, k[0], v[0])
        return attended.transpose(1, 2)[self._origin].transpose(0, 1)[None]


class NextTokens:
    """One token of every row.

    Args:
        positions: [B], its position.
        tables: int32 [B, width], pages of each row.
        windows: [B].
        manner: how to attend.
        like: a tensor on the device, in the format of keys.
    """

    def __init__(self, positions: Tensor, tables: Tensor, windows: Tensor, manner: Manner, like: Tensor) -> None:
        scale, bias, rotary = manner
        self._scale, self._mask = scale, None
        self._launch = (tables, positions, windows, scale, bias.by_distance if bias else None, rotary)
        self._has_kernels = can_run_on(like.device)
        if self._has_kernels:
            return
        self._turn = manner.turning(positions[:, None], like)
        entries = positions % windows
        self._entries = tables.gather(1, (entries // PAGE)[:, None])[:, 0] * PAGE + entries % PAGE
        lengths = torch.minimum(positions + 1, windows)
        self._held = Held(tables, lengths)
        if bias:
            held = cell_positions(positions, windows, int(lengths.max()))
            self._mask = biased((held >= 0)[:, None, None], bias(positions[:, None], held), like)  # [B, H, 1, S]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        """Keep k and v, [B, H, 1, D] each, in a layer's memory, and attend to what is there."""
        if self._has_kernels:
            from ..ops.kernels.decode_attention import attend

            return attend(q, k, v, memory, *self._launch)
        q, k = (self._turn(q), self._turn(k)) if self._turn else (q, k)
        put_entries(memory, self._entries, k[:, :, 0], v[:, :, 0])
        return self._held.attend(q, memory, self._mask, self._scale)


class KeptSource:
    """What was kept of the encoder's output: every token sees all that its row's encoder was given.

    Args:
        tables: int32 [n, width], pages of that: of rows with one token each, or of each token of rows one behind the
            other.
        lengths: int64 [n].
        scale: of q k.
    """

    def __init__(self, tables: Tensor, lengths: Tensor, scale: float) -> None:
        self._launch, self._scale = (tables, lengths, lengths, scale), scale  # a window of its length: all is seen
        self._held = None if can_run_on(lengths.device) else Held(tables, lengths)

    def __call__(self, q: Tensor, memory: Tensor) -> Tensor:
        """Attend from q, [n, H, 1, D] or [1, H, n, D], to what a layer's memory has."""
        if q.shape[2] > 1:
            return self(q.transpose(0, 2), memory).transpose(0, 2)
        if self._held:
            return self._held.attend(q, memory, None, self._scale)
        from ..ops.kernels.decode_attention import attend

        return attend(q, None, None, memory, *self._launch)


def cell_positions(last: Tensor, windows: Tensor, cells: int) -> Tensor:
    """Say which position each of the first entries holds once the one at ``last`` is written.

    Args:
        last: [B].
        windows: [B] of the rows' slots.
        cells: S.

    Returns:
        [B, S]; negative: none.
    """
    index, window = torch.arange(cells, device=last.device), windows[:, None]
    held = last[:, None] - (last[:, None] - index) % window
    return held.masked_fill(index >= window, -1)


def biased(is_seen: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
    """Give the mask that attention adds: the bias where a key is seen, minus infinity elsewhere."""
    if bias is None:
        return is_seen
    mask = bias.masked_fill(~is_seen, -math.inf).to(like.dtype)
    length = mask.shape[-1]
    # A GPU's attention takes rows that begin at multiples of 16 bytes; others are copied in every layer.
    return F.pad(mask, (0, -length % 8))[..., :length] if mask.is_cuda and length % 8 else mask


def can_pack(like: Tensor) -> bool:
    """Say whether torch has a kernel for heads, [..., D], of this format that takes rows side by side."""
    return like.is_cuda and like.dtype != torch.float32 and like.shape[-1] % 8 == 0 and like.shape[-1] <= 256
