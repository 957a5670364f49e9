"""Attention over the cache: which cells a call's tokens are kept in, which keys each token sees, and with what bias.

B: rows; T: tokens of the call; S: keys that a row looks at; H: heads; D: size of a head.

The token at position p of a row is kept in cell p % window of the row's slot (cache.py): a slot remembers the last
``window`` tokens. What else a slot holds, and what padding has left there, is masked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..network.positions import Bias

Slots = Tensor | slice  # which slot each row has: [B], or neighbours in order, whose memory is read where it is


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


@dataclass(frozen=True)
class Source:
    """What the rows of an encoder-decoder answer to; see Network.remember.

    Attributes:
        lengths: [B] of their inputs.
        longest: the largest of them, known on the host.
        tasks: [B], each row's IA3 task; None: no row has one.
    """

    lengths: Tensor
    longest: int
    tasks: Tensor | None = None


class KeptSource:
    """What the encoder has made of each row's input, kept as keys and values: every token of a row sees all of it.

    Args:
        cells: where that is.
        lengths: [B], of the inputs.
        longest: the largest of them.
        scale: of q k.
        like: a tensor on the device, in the format of keys.
    """

    def __init__(self, cells: Cells, lengths: Tensor, longest: int, scale: float, like: Tensor) -> None:
        self._cells, self._longest = cells, longest
        self._attend = WholeInput(lengths, longest, None, scale, like)

    def __call__(self, q: Tensor, memory: Tensor) -> Tensor:
        """Attend from q, [B, H, T, D], to what a layer's memory has."""
        return self._attend(q, *self._cells.read(memory, self._longest))


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
    mask = bias.masked_fill(~is_seen, -math.inf).to(like.dtype)
    length = mask.shape[-1]
    # A GPU's attention takes rows that begin at multiples of 16 bytes; others are copied in every layer.
    return F.pad(mask, (0, -length % 8))[..., :length] if mask.is_cuda and length % 8 else mask
