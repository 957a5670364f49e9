"""Attention over the cache: which cells a call's tokens are kept in, which keys each token sees, and with what bias.

B: rows; T: tokens of the call; S: keys that a row looks at; H: heads; D: size of a head.

The token at position p of a row is kept in cell p % window of the row's slot (cache.py): a slot remembers the last
``window`` tokens. What else a slot holds, and what padding has left there, is masked.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

Slots = Tensor | slice  # which slot each row has: [B], or neighbours in order, whose memory is read where it is


class Bias(Protocol):
    """What attention adds to its scores.

    Attributes:
        by_distance: of a key before its query: fp32 [H], what each token of distance costs (ALiBi's slopes), or [H, n],
            of each distance, the last of all that are further.
    """

    @property
    def by_distance(self) -> Tensor:
        """See above."""

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Positions [B, T] and [B, S] -> [B, H, T, S]."""


_MAX_DISTANCE = 128  # of T5's buckets; FasterTransformer and Hugging Face agree on it


class Cells(Protocol):
    """Where some rows keep their keys and values in a layer's part of the cache."""

    def begin(self, memory: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """Keep the first tokens of rows, k and v [B, H, T, D], of which ``lengths`` [B] are real."""

    def write(self, memory: Tensor, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """Keep tokens, k and v [B, H, T, D], in cells [B, T] of their rows."""

    def read(self, memory: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Give what the first cells of each row hold, [B, H, longest, D] each."""


class SlotCells:
    """Cells of slots that are one piece of memory each: memory is [2 (k, v), slots, H, capacity, D]."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def begin(self, memory: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> None:
        """See Cells."""
        length = k.shape[2]
        memory[0, self._slots, :, :length], memory[1, self._slots, :, :length] = k, v

    def write(self, memory: Tensor, cells: Tensor, k: Tensor, v: Tensor) -> None:
        """See Cells."""
        rows = indices(self._slots, k)[:, None]
        memory[0, rows, :, cells] = k.transpose(1, 2)  # indexed axes come first: [B, T, H, D]
        memory[1, rows, :, cells] = v.transpose(1, 2)

    def read(self, memory: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """See Cells."""
        return memory[0, self._slots, :, :longest], memory[1, self._slots, :, :longest]


class NewRows:
    """Rows that begin: token t is at position t, and sees what comes before it.

    Args:
        lengths: [B], how many of T are real.
        length: T.
        cells: of the rows.
        bias: by positions; None: none.
        scale: of q k.
        like: a tensor on the device, in the format of keys.
    """

    def __init__(
        self, lengths: Tensor, length: int, cells: Cells, bias: Bias | None, scale: float, like: Tensor
    ) -> None:
        self._lengths, self._cells, self._scale, self._mask = lengths, cells, scale, None
        if bias:
            steps = torch.arange(length, device=like.device)
            self._mask = biased(steps <= steps[:, None], bias(steps[None], steps[None]), like)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        """Keep k and v, [B, H, T, D] each, in a layer's memory, and attend to them."""
        self._cells.begin(memory, k, v, self._lengths)
        is_causal = self._mask is None
        return F.scaled_dot_product_attention(q, k, v, self._mask, is_causal=is_causal, scale=self._scale)


class ContinuedRows:
    """Rows that go on from what their slots hold, several tokens at a time.

    Args:
        starts: [B], position of the first token.
        lengths: [B], how many of T are real.
        length: T.
        cells: of the rows.
        windows: [B] of the slots.
        longest: cells of a slot to look at.
        bias: by positions; None: none.
        scale: of q k.
        like: a tensor on the device, in the format of keys.
    """

    def __init__(
        self,
        starts: Tensor,
        lengths: Tensor,
        length: int,
        cells: Cells,
        windows: Tensor,
        longest: int,
        bias: Bias | None,
        scale: float,
        like: Tensor,
    ) -> None:
        self._cells, self._scale, self._longest = cells, scale, longest
        steps = torch.arange(length, device=starts.device)
        positions = starts[:, None] + steps  # [B, T]
        held = cell_positions(starts - 1, windows, longest)  # [B, S]
        keys = torch.cat((held, positions), 1)  # [B, S + T]
        too_old = (positions - windows[:, None])[:, :, None]  # [B, T, 1]
        is_seen = (keys >= 0)[:, None] & (keys[:, None] > too_old) & (keys[:, None] <= positions[:, :, None])
        self._mask = biased(is_seen[:, None], bias(positions, keys) if bias else None, like)  # [B, 1 or H, T, S + T]
        # Padding writes what the last real token writes, to the same place.
        self._sources = torch.minimum(steps, lengths[:, None] - 1)  # [B, T]
        self._targets = (starts[:, None] + self._sources) % windows[:, None]  # [B, T]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        """See NewRows."""
        held, values = self._cells.read(memory, self._longest)
        keys, values = torch.cat((held, k), 2), torch.cat((values, v), 2)  # [B, H, S + T, D]
        attended = F.scaled_dot_product_attention(q, keys, values, self._mask, scale=self._scale)
        index = self._sources[:, None, :, None].expand_as(k)
        self._cells.write(memory, self._targets, k.gather(2, index), v.gather(2, index))
        return attended


class NextTokens:
    """One token of every row.

    Args:
        positions: [B], its position.
        cells: of the rows.
        windows: [B] of the slots.
        longest: cells of a slot to look at.
        bias: by positions; None: none.
        scale: of q k.
        like: a tensor on the device, in the format of keys.
    """

    def __init__(
        self,
        positions: Tensor,
        cells: Cells,
        windows: Tensor,
        longest: int,
        bias: Bias | None,
        scale: float,
        like: Tensor,
    ) -> None:
        self._cells, self._scale, self._longest = cells, scale, longest
        self._targets = (positions % windows)[:, None]
        self._mask = None
        if bias:
            held = cell_positions(positions, windows, longest)  # [B, S]
            self._mask = biased((held >= 0)[:, None, None], bias(positions[:, None], held), like)
        elif len(positions) > 1:  # a row that is alone fills all cells in use
            in_use = torch.arange(longest, device=positions.device) < torch.minimum(positions + 1, windows)[:, None]
            self._mask = in_use[:, None, None]  # [B, 1, 1, S]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor) -> Tensor:
        """See NewRows."""
        self._cells.write(memory, self._targets, k, v)
        keys, values = self._cells.read(memory, self._longest)
        return F.scaled_dot_product_attention(q, keys, values, self._mask, scale=self._scale)


class WholeInput:
    """Every token of a row sees every other: an encoder's attention, and a decoder's to what the encoder has made.

    Args:
        lengths: [B], real tokens.
        length: S.
        bias: by positions; None: none.
        scale: of q k.
        like: a tensor on the device, in the format of keys.
        kept: takes what each call's queries attend to, fp32 [B, H, T, S]; None: nobody asks.
    """

    def __init__(
        self,
        lengths: Tensor,
        length: int,
        bias: Bias | None,
        scale: float,
        like: Tensor,
        kept: list[Tensor] | None = None,
    ) -> None:
        self._scale, self._kept = scale, kept
        steps = torch.arange(length, device=lengths.device)
        is_real = (steps < lengths[:, None])[:, None, None]  # [B, 1, 1, S]
        self._mask = biased(is_real, bias(steps[None], steps[None]) if bias else None, like)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from q, [B, H, T, D], to k and v, [B, H, S, D] -> [B, H, T, D]."""
        if self._kept is not None:
            scores = (q @ k.transpose(2, 3)).float() * self._scale
            is_bias = self._mask.dtype != torch.bool
            scores = scores + self._mask if is_bias else scores.masked_fill(~self._mask, -math.inf)
            self._kept.append(scores.softmax(-1))
            return self._kept[-1].to(v.dtype) @ v
        return F.scaled_dot_product_attention(q, k, v, self._mask, scale=self._scale)


def indices(slots: Slots, rows: Tensor) -> Tensor:
    """Give the slots of [B, ...] rows as [B]."""
    if isinstance(slots, Tensor):
        return slots
    return torch.arange(slots.start or 0, slots.stop, device=rows.device)


def cell_positions(last: Tensor, windows: Tensor, cells: int) -> Tensor:
    """Say which position each of the first cells holds once the one at ``last`` is written.

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
    return bias.masked_fill(~is_seen, -math.inf).to(like.dtype)


class Alibi:
    """Penalises distance by each head's slope, fp32 [H]; a Bias."""

    def __init__(self, slopes: Tensor) -> None:
        self.by_distance = slopes

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """See Bias."""
        return self.by_distance[:, None, None] * (keys[:, None] - queries[:, :, None])[:, None]


class Relative:
    """Looks the bias up by bucketed distance, as T5 does; a Bias.

    Args:
        table: [H, buckets].
        is_both_ways: whether keys may come after queries: half of the buckets is theirs.
    """

    def __init__(self, table: Tensor, is_both_ways: bool) -> None:
        self._table, self._is_both_ways = table, is_both_ways
        behind = -torch.arange(_MAX_DISTANCE + 1, device=table.device)
        self.by_distance = table[:, bucket(behind, table.shape[1], is_both_ways)].float().contiguous()

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """See Bias."""
        distance = keys[:, None] - queries[:, :, None]  # [B, T, S]
        return self._table[:, bucket(distance, self._table.shape[1], self._is_both_ways)].movedim(0, 1)


def bucket(distance: Tensor, buckets: int, is_both_ways: bool) -> Tensor:
    """Number distances: one bucket each for small ones, then by their logarithm up to 128 (T5, appendix; any shape)."""
    offset = torch.zeros_like(distance)
    if is_both_ways:
        buckets //= 2
        offset = (distance > 0) * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    far = exact + ((distance.clamp(min=1) / exact).log() / math.log(_MAX_DISTANCE / exact) * (buckets - exact)).long()
    return offset + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


class Rotary(NamedTuple):
    """How positions turn queries and keys.

    Attributes:
        width: numbers of each head that are turned.
        is_by_pairs: whether neighbours are turned with each other (GPT-J), else the two halves (GPT-NeoX).
        base: of the wave lengths.
    """

    width: int
    is_by_pairs: bool
    base: float = 10000.0


class Rotation:
    """Rotary positions: turns the first numbers of each head's query and key by angles that grow with the position.

    Args:
        positions: [B or 1, T].
        rotary: how.
        dtype: of queries and keys.
    """

    def __init__(self, positions: Tensor, rotary: Rotary, dtype: torch.dtype) -> None:
        self._width, self._is_by_pairs, base = rotary
        powers = torch.arange(0, self._width, 2, device=positions.device, dtype=torch.float32) / self._width
        angles = positions[..., None].float() * (base**-powers)  # [B or 1, T, width / 2]
        spread = angles.repeat_interleave(2, -1) if self._is_by_pairs else torch.cat((angles, angles), -1)
        self._cos, self._sin = spread.cos().to(dtype)[:, None], spread.sin().to(dtype)[:, None]  # [B or 1, 1, T, width]

    def __call__(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> the same, turned."""
        turned, rest = x[..., : self._width], x[..., self._width :]
        if self._is_by_pairs:
            other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            other = torch.cat((-second, first), -1)
        return torch.cat((turned * self._cos + other * self._sin, rest), -1)
