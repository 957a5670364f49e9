"""Rows of a call whose layers keep states: which state each row has, and how its tokens are cut into chunks.

B: rows; T: tokens of all of them together; L: tokens of a chunk; b: rows that have such a chunk; K: tokens that the
convolution sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..arrays import Array, upload
from ..cache.states import LayerState
from .packed_rows import Rows

CHUNK = 64  # tokens that a scan computes together
_ROUNDED = 16  # a row's last chunk is padded to a multiple of it, and shares a product with those of its size alone
_MOST_TOKENS = 4096  # of the chunks of one product


class Chunk(NamedTuple):
    """Chunks of one size that rows have at one place.

    Attributes:
        rows: int64 [b], which of the call's rows these are.
        places: int64 [b, L], where the tokens lie among all; padding repeats the row's last one.
        targets: int64 [b, L], where results go: padding's to place T, behind all.
        is_there: bool [b, L, 1]: not padding.
    """

    rows: Tensor
    places: Tensor
    targets: Tensor
    is_there: Tensor


class Recurrence(Protocol):
    """How a memory goes from token to token, of a layer."""

    def step(self, given: Sequence[Tensor], memory: Tensor) -> tuple[Tensor, Tensor]:
        """Run one token of each row, [B, ...], on a memory, which may be overwritten; returns outputs and memory."""

    def run_chunk(self, given: Sequence[Tensor], is_there: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Run a chunk of each row, [b, L, ...], of which padding, see Chunk, leaves the memory as it is."""


class Mixing(Protocol):
    """What a layer computes between its products, in torch."""

    def mix(self, rows: StateRows, given: Sequence[Tensor], state: LayerState) -> Tensor:
        """Compute an output of each token, fp32 [T, width], of products, [T, ...] each; the rows' states go on."""


class StateRows:
    """The states of a call's rows.

    Args:
        states: int64 [B], on the device.
        rows: packed rows; None: each has one token, and goes on.

    Attributes:
        tokens: of the call, that are theirs.
        block_tokens: that a layer computes at a time: what it needs of memory is fp32, and several times its input.
    """

    block_tokens = 2048
    tokens = slice(None)

    def __init__(self, states: Tensor, rows: Rows | None = None) -> None:
        self.states, self._rows = states, rows
        self.is_packed = rows is not None

    @cached_property
    def _lengths(self) -> Array:
        assert self._rows and self._rows.lengths, "packed rows whose lengths the host knows"
        return np.array(self._rows.lengths)

    @cached_property
    def _begins(self) -> Tensor:
        """Which rows begin, bool [B]: their first token is at position 0."""
        assert self._rows
        return self._rows.positions[self._rows.ends[:-1].long()] == 0

    def in_blocks(self, x: Tensor, run: Callable[[Tensor, StateRows], Tensor]) -> Tensor:
        """Run a function of tokens, [B, T, ...], and their rows on some of them at a time."""
        if not self.is_packed or x.shape[1] <= self.block_tokens:
            return run(x, self)
        return torch.cat([run(x[:, rows.tokens], rows) for rows in self._blocks], 1)

    @cached_property
    def _blocks(self) -> list[StateRows]:
        """Cut the tokens into blocks; a row is cut between two chunks, so that its numbers stay the same."""
        found, begin, room = list[StateRows](), 0, self.block_tokens
        of_block: dict[int, int] = {}  # row -> tokens
        for row, left in enumerate(self._lengths.tolist()):
            while left:
                taken = min(left, room)
                taken -= taken % CHUNK if taken < left else 0
                of_block |= {row: taken} if taken else {}
                left, room = left - taken, room - taken
                if left or not room:
                    found.append(self._block(begin, of_block))
                    begin, room, of_block = found[-1].tokens.stop, self.block_tokens, {}
        return [*found, self._block(begin, of_block)] if of_block else found

    def _block(self, begin: int, lengths: dict[int, int]) -> StateRows:
        assert self._rows
        tokens, rows = slice(begin, begin + sum(lengths.values())), slice(min(lengths), max(lengths) + 1)
        ends = upload(np.cumsum([0, *lengths.values()]).astype(np.int32), self.states.device)
        ids, positions, slots = self._rows.ids[tokens], self._rows.positions[tokens], self._rows.slots[tokens]
        found = type(self)(self.states[rows], Rows(ids, positions, slots, ends, list(lengths.values())))
        found.tokens = tokens
        return found

    def mix(self, mixing: Mixing, given: Sequence[Tensor], state: LayerState, dtype: torch.dtype) -> Tensor:
        """Compute what is between a layer's products, see Mixing, of products and in a type."""
        return mixing.mix(self, given, state).to(dtype)

    def read(self, part: Tensor) -> Tensor:
        """Read a part of the rows' states, [B, ...]; zeros of rows that begin."""
        content = part[self.states]
        if not self.is_packed:
            return content
        return torch.where(self._begins.view(-1, *[1] * (content.dim() - 1)), 0.0, content)

    def write(self, part: Tensor, content: Tensor) -> None:
        """Write a part of the rows' states, [B, ...]."""
        part[self.states] = content

    def scan(self, recurrence: Recurrence, given: Sequence[Tensor], memory: Tensor) -> Tensor:
        """Run a recurrence over the tokens.

        Args:
            recurrence: of the layer.
            given: of the tokens, fp32 [T, ...] each.
            memory: of the layer's states; is updated.

        Returns:
            Its outputs, fp32 [T, ...].
        """
        content = self.read(memory)
        if not self.is_packed:
            outputs, content = recurrence.step(given, content)
            self.write(memory, content)
            return outputs
        found: Tensor | None = None
        for chunk in self.chunks:
            part = [each[chunk.places] for each in given]
            outputs, content[chunk.rows] = recurrence.run_chunk(part, chunk.is_there, content[chunk.rows])
            if found is None:
                found = outputs.new_empty(len(given[0]) + 1, *outputs.shape[2:])
            found[chunk.targets] = outputs
        assert found is not None
        self.write(memory, content)
        return found[:-1]

    def convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor) -> Tensor:
        """Convolve each channel over a token and those before it, and apply SiLU.

        Args:
            x: fp32 [T, channels]; T is B where rows are not packed.
            weight: fp32 [channels, K], the token's own number last.
            bias: fp32 [channels]; None: there is none.
            past: of the layer's states; is updated.
        """
        before, most = self.read(past), weight.shape[1] - 1
        if not self.is_packed:
            seen = torch.cat((before, x[:, None]), 1)
            self.write(past, seen[:, 1:])
            found = (seen * weight.T).sum(1)
        else:
            own, first, last = self._places(most)
            seen = x.new_empty(len(x) + before[..., 0].numel(), x.shape[1])
            seen[own], seen[first] = x, before
            self.write(past, seen[last])
            found = x * weight[:, most]
            for tap in range(most):
                found += seen[own - most + tap] * weight[:, tap]
        return F.silu(found if bias is None else found + bias)

    def _places(self, most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return where tokens lie, [T], if ``most`` others are put before each row; these; and each row's last ones."""
        lengths, rows = self._lengths, np.arange(len(self._lengths))
        ends = np.cumsum(lengths + most)
        own = np.arange(lengths.sum()) + np.repeat((rows + 1) * most, lengths)
        others = np.arange(most)
        first, last = (ends - lengths - most)[:, None] + others, (ends - most)[:, None] + others
        device = self.states.device
        return upload(own, device), upload(first, device), upload(last, device)

    @cached_property
    def chunks(self) -> list[Chunk]:
        """The chunks of packed rows: all that come first in their rows, then all that come second, and so on."""
        return list(self._cut())

    def _cut(self) -> Iterator[Chunk]:
        lengths = self._lengths
        starts, total = np.cumsum(lengths) - lengths, lengths.sum()
        for begin in range(0, lengths.max(), CHUNK):
            left = np.minimum(lengths - begin, CHUNK)
            sizes = -(-left // _ROUNDED) * _ROUNDED
            for size in np.unique(sizes[left > 0]):
                rows = np.flatnonzero(sizes == size)
                for some in np.split(rows, range(step := _MOST_TOKENS // size, len(rows), step)):
                    yield self._chunk(some, starts[some] + begin, left[some], size, total)

    def _chunk(self, rows: Array, firsts: Array, lengths: Array, size: int, total: int) -> Chunk:
        offsets = np.arange(size)
        is_there = offsets < lengths[:, None]
        places = firsts[:, None] + np.minimum(offsets, lengths[:, None] - 1)
        targets = np.where(is_there, places, total)
        return Chunk(*(upload(each, self.states.device) for each in (rows, places, targets, is_there[..., None])))


def cut(x: Tensor, count: int) -> Tensor:
    """Cut the last axis into parts of one size, [..., n] -> [..., count, n / count]."""
    return x.view(*x.shape[:-1], count, -1)
