"""Which queries, and which of their cells, each program of prefill attention has: cut on the device, for all layers.

A block is some tokens of a row. A chunk of a prompt has few of them, and each of its tokens may see thousands of cells:
then several programs share a block, and each attends to a piece of its cells. A CUDA graph is captured before it is
known how many cells there will be. So the device chooses the number of pieces, and a launch has programs enough for
any choice; those that have nothing to do end at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .row_plan import plan_rows

BLOCK_FIELDS = tl.constexpr(6)
_ROWS_AT_ONCE = tl.constexpr(128)
_MOST_PARTS = tl.constexpr(32)
_ROUNDING = tl.constexpr(64)  # a piece is rounded down to whole cells, so there may be a few programs too many


class Split(NamedTuple):
    """How programs share the cells of a block.

    Attributes:
        rounds: if more programs share blocks than run at the same time, they run in as many rounds at most; 0: no block
            is shared.
        least: cells of a piece at least.
        cost: of a piece, as the number of cells that a program attends to in the time that it takes to begin, and to
            write what is to be merged.
    """

    rounds: int = 3
    least: int = 512
    cost: int = 384


class Reads(NamedTuple):
    """What attention to pages is like, as far as the cut depends on it.

    Attributes:
        positions: int64 [T], of each token in its row.
        reach: how many cells a token sees, its own among them.
        kv_heads: number of KV heads; each has programs of its own.
        at_once: programs that the GPU runs at the same time.
        split: how programs share cells.
    """

    positions: Tensor
    reach: int
    kv_heads: int
    at_once: int
    split: Split


@triton.jit
def _rows_back(ends, positions, first, rows, reach, queries: tl.constexpr, is_paged: tl.constexpr):
    """Count blocks, and cells that a block sees at most, of some rows, from the last but ``first`` backwards."""
    back = first + tl.arange(0, _ROWS_AT_ONCE)
    is_row, place = back < rows, ends + rows - 1 - back
    begin = tl.load(place, is_row, 0)
    lengths = tl.load(place + 1, is_row, 0) - begin
    cells = lengths
    if is_paged:
        lengths = tl.where(lengths == 1, 0, lengths)
        before = tl.load(positions + begin, lengths > 0, 0).to(tl.int32)
        cells = tl.where(lengths > 0, tl.minimum(before + lengths, reach + queries), 0)
    return tl.cdiv(lengths, queries), cells


@triton.jit
def _choose_piece(ends, positions, rows, reach, heads, at_once, rounds, least, cost, queries: tl.constexpr):
    """Choose how many cells a piece has; 0: blocks are not split.

    A round of programs takes as long as a piece does. The longest row has the number of pieces with which all rounds
    together are the shortest, and the pieces of the other rows are as large.
    """
    work, longest = 0.0, 0
    for first in range(0, rows, _ROWS_AT_ONCE):
        counts, cells = _rows_back(ends, positions, first, rows, reach, queries, True)
        work += tl.sum(counts.to(tl.float32) * cells, 0)
        longest = tl.maximum(longest, tl.max(cells, 0))
    work *= heads
    parts = 1 + tl.arange(0, _MOST_PARTS)
    cells = longest // parts
    needed = tl.maximum(tl.ceil(work / tl.maximum(cells, 1) / at_once - 1 / _ROUNDING), 1)
    allowed = tl.where(work < 1.0 * longest * at_once, rounds, 0)  # as they are, blocks keep the GPU busy
    may_split = (needed <= allowed) & (cells >= least)
    spent = tl.where((parts == 1) | may_split, needed * (cells + tl.where(parts == 1, 0, cost)), float("inf"))
    chosen = tl.min(tl.where(spent == tl.min(spent, 0), parts, _MOST_PARTS), 0)
    return tl.where(chosen == 1, 0, longest // chosen)


@triton.jit
def _parts_of(cells, piece):
    return tl.where(piece == 0, 1, tl.maximum(cells // tl.maximum(piece, 1), 1))


@triton.jit(do_not_specialize=("positions", "rows", "reach", "heads", "at_once", "rounds", "least", "cost"))
def _cut(
    ends, positions, blocks, rows, reach, heads, at_once, rounds, least, cost, queries: tl.constexpr,
    is_paged: tl.constexpr,
):  # fmt: skip
    """Write what a program attends to; see PackedRows.cut."""
    index = tl.program_id(0)
    size = 0
    if is_paged:
        size = _choose_piece(ends, positions, rows, reach, heads, at_once, rounds, least, cost, queries)
    # Rows behind the program's; programs of these, and those of them that share blocks; programs of the rows looked at.
    later, before, shared, passed = 0, 0, 0, 0
    for first in range(0, rows, _ROWS_AT_ONCE):
        counts, cells = _rows_back(ends, positions, first, rows, reach, queries, is_paged)
        parts = _parts_of(cells, size)
        programs = counts * parts
        is_later = (passed + tl.cumsum(programs, 0) <= index) & (first + tl.arange(0, _ROWS_AT_ONCE) < rows)
        later += tl.sum(is_later.to(tl.int32), 0)
        before += tl.sum(tl.where(is_later, programs, 0), 0)
        shared += tl.sum(tl.where(is_later & (parts > 1), programs, 0), 0)
        passed += tl.sum(programs, 0)
    row = tl.maximum(rows - 1 - later, 0)
    begin = tl.load(ends + row)
    length = tl.where(later == rows, 0, tl.load(ends + row + 1) - begin)
    parts = 1
    if is_paged:
        cells = tl.load(positions + begin, length > 0, 0).to(tl.int32) + length
        parts = _parts_of(tl.minimum(cells, reach + queries), size)
    place = index - before
    own = blocks + index * BLOCK_FIELDS
    tl.store(own, begin)
    tl.store(own + 1, length)
    tl.store(own + 2, (tl.cdiv(length, queries) - 1 - place // parts) * queries)
    tl.store(own + 3, place % parts)
    tl.store(own + 4, parts)
    tl.store(own + 5, shared + place)


class PackedRows:
    """Rows that are consecutive parts of one axis of tokens.

    Args:
        ends: int32 [B + 1]: 0, then where each row ends.
        tokens: of all rows at least.
        longest: at least the length of the longest row, with what is cached of it.
        several: at least the number of rows of more than one token; None: any may have more.
    """

    def __init__(self, ends: Tensor, tokens: int, longest: int, several: int | None = None) -> None:
        self.ends, self._tokens, self.longest = ends, tokens, longest
        self._several = len(ends) - 1 if several is None else several
        self._cut: dict[tuple[int, ...], Tensor] = {}
        self._plan: Tensor | None = None

    def plan(self, positions: Tensor, slots: Tensor) -> Tensor:
        """Order the rows of one token, for all layers; see plan_rows."""
        if self._plan is None:
            self._plan = plan_rows(positions, None, slots, self.ends)
        return self._plan

    def cut(self, queries: int, reads: Reads | None = None) -> tuple[Tensor, int]:
        """Cut rows into blocks of ``queries`` tokens, and the cells that these see into pieces, for all layers.

        Args:
            queries: tokens of a block.
            reads: of attention to what is cached: rows of one token have no block; None: rows see themselves, in one
                piece.

        Returns:
            int32 [n, 6]: the first token of each program's row; the row's length, 0 if there is nothing to do; the
            block's first token in its row; which piece of the block's cells the program has, and of how many; if there
            are several, the program's place among all that share blocks. The last block comes first. And the number of
            these places at most, 0 if no block is shared.
        """
        rows, rounds, shared = len(self.ends) - 1, 0, 0
        # At least: of each row one block is not full.
        count = self._tokens // queries + (rows if reads is None else self._several)
        if reads and self.longest >= 2 * reads.split.least:
            few = self._tokens // queries * reads.kv_heads < reads.at_once
            rounds = reads.split.rounds if few else 0
            shared = rounds and triton.cdiv(
                rounds * reads.at_once + reads.at_once // _ROUNDING.value + 1, reads.kv_heads
            )
        key = (queries, *(reads[1:-1] if reads else ()), *(reads.split if reads else ()))
        if key not in self._cut:
            blocks = torch.empty(count + shared, BLOCK_FIELDS.value, dtype=torch.int32, device=self.ends.device)
            given = (reads.reach, reads.kv_heads, reads.at_once) if reads else (0, 0, 0)
            least, cost = (reads.split.least, reads.split.cost) if reads else (0, 0)
            _cut[(len(blocks),)](
                self.ends, reads.positions if reads else None, blocks, rows, *given, rounds, least, cost,
                queries=queries, is_paged=reads is not None, num_warps=1,
            )  # fmt: skip
            self._cut[key] = blocks
        return self._cut[key], shared
