"""The likeliest token of a vocabulary of which several GPUs have a part each; see peer_sum for how they exchange it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...sampling.sampling import NOT_FINITE
from .all_reduce import PATIENCE
from .decode_attention import abilities


@triton.jit(do_not_specialize=("columns", "first", "rank"))
def _agree(
    tokens, ids, logits, memory, addresses, turns, lost, columns, first, rank, most, nobody,
    size: tl.constexpr, padded: tl.constexpr, patience: tl.constexpr, is_chained: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    ranks = tl.arange(0, padded)
    is_there = ranks < size
    theirs = tl.load(addresses + ranks, is_there, 0).to(tl.pointer_type(tl.int64))
    if is_chained:
        gdc_wait()
        gdc_launch_dependents()
    turn = tl.load(turns + row) + 1
    looks = tl.where(tl.load(lost, volatile=True) == 0, patience, 0)
    mine = tl.load(tokens + row)
    value = tl.load(logits + row.to(tl.int64) * columns + tl.maximum(mine, 0))
    token = tl.where(mine == nobody, nobody, mine + first)
    stamp = turn.to(tl.int64) << 32
    # A value and its token, of every rank: [2 halves, ranks, rows, 2].
    half = (turn & 1) * size
    at = ((half + rank) * most + row) * 2
    tl.store(theirs + at, stamp | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) + ranks * 0, is_there)
    tl.store(theirs + at + 1, stamp | (token & 0xFFFFFFFF) + ranks * 0, is_there)
    places = memory + ((half + ranks) * most + row) * 2
    values = tl.load(places, is_there, 0, volatile=True)
    found = tl.load(places + 1, is_there, 0, volatile=True)
    missing = tl.sum((is_there & (((values >> 32) != turn) | ((found >> 32) != turn))).to(tl.int32), 0)
    while (missing > 0) & (looks > 0):
        values = tl.load(places, is_there, 0, volatile=True)
        found = tl.load(places + 1, is_there, 0, volatile=True)
        missing = tl.sum((is_there & (((values >> 32) != turn) | ((found >> 32) != turn))).to(tl.int32), 0)
        looks = tl.where(tl.load(lost, volatile=True) == 0, looks - 1, 0)
    if missing > 0:
        tl.store(lost, 1)
    numbers = tl.where(is_there, values.to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    candidates = found.to(tl.int32)  # nobody's is below all others
    is_best = is_there & (numbers == tl.max(numbers, 0))
    best = tl.min(tl.where(is_best, candidates, 0x7FFFFFFF), 0)
    is_lost = (tl.min(tl.where(is_there, candidates, 0), 0) < 0) | (missing > 0)
    tl.store(tokens + row, tl.where(is_lost, nobody, best).to(tl.int64))
    tl.store(ids + row, tl.where(is_lost, 0, best).to(tl.int64))
    tl.debug_barrier()
    tl.store(turns + row, turn)


def agree(
    tokens: Tensor,
    ids: Tensor,
    logits: Tensor,
    first: int,
    memory: Tensor,
    addresses: Tensor,
    rank: int,
    turns: Tensor,
    lost: Tensor,
) -> None:
    """Put each row's likeliest token of all ranks in place of this rank's.

    Args:
        tokens: int64 [B], this rank's, counted from its part's first; NOT_FINITE in rows that overflow. Overwritten.
        ids: int64 [B]; takes the tokens too, and 0 where one is lost.
        logits: fp32 [B, part], contiguous.
        first: token of this rank's part.
        memory: int64 [2, ranks, rows, 2], this rank's, 0 at first.
        addresses: int64 [ranks], of all ranks' memory.
        rank: this one.
        turns: int32 [rows], 0 at first: how often each row has been exchanged.
        lost: int32 [1], 0 at first; anything else ends all waiting.
    """
    size = len(addresses)
    is_chained = abilities(logits.device)
    _agree[(len(tokens),)](
        tokens, ids, logits, memory, addresses, turns, lost, logits.shape[1], first, rank, len(turns), NOT_FINITE,
        size=size, padded=triton.next_power_of_2(size), patience=PATIENCE, is_chained=is_chained,
        num_warps=1, launch_pdl=is_chained,
    )  # fmt: skip
