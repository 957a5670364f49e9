"""All-reduce through peer memory: sums, and the argmax of a split vocabulary; each GPU writes to all others' memory.

A number is sent with the count of the sum that it belongs to, in 8 bytes that are written at once (NCCL's protocol for
short messages, LL, does the same). So no rank waits for a signal: a number with the right count is complete. Every GPU
adds in the order of the ranks. The memory has two halves, used by turns: a rank that writes to a half for the sum after
the next has received all ranks' parts of the next one, so all ranks have read that half.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..logits import NOT_FINITE
from .launch import uses_pdl

PROGRAMS, _BLOCK = 128, 256  # the same in every sum: each program counts them by itself
PATIENCE = 1 << 25  # polls until a program times out, about half a minute


@triton.jit(do_not_specialize=("count", "rank"))
def _all_reduce_add(
    x, part, memory, addresses, turns, lost, count, rank, most,
    size: tl.constexpr, padded: tl.constexpr, block: tl.constexpr, programs: tl.constexpr, patience: tl.constexpr,
    uses_pdl: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    ranks = tl.arange(0, padded)
    peers = tl.load(addresses + ranks, ranks < size, 0)
    if uses_pdl:
        gdc_launch_dependents()
        gdc_wait()
    turn = tl.load(turns + program) + 1
    polls_left = tl.where(tl.load(lost, volatile=True) == 0, patience, 0)
    half = (turn & 1) * (size * most)
    for start in range(program * block, count, programs * block):
        at = start + tl.arange(0, block)
        bits = tl.load(part + at, at < count, 0).to(tl.float32).to(tl.int32, bitcast=True)
        words = (bits.to(tl.int64) & 0xFFFFFFFF) | (turn.to(tl.int64) << 32)
        cells = peers[:, None].to(tl.pointer_type(tl.int64)) + (half + rank * most + at)[None, :]
        is_valid = (ranks < size)[:, None] & (at < count)[None, :]
        tl.store(cells, tl.broadcast_to(words[None, :], (padded, block)), is_valid)
    for start in range(program * block, count, programs * block):
        at = start + tl.arange(0, block)
        is_valid = (ranks < size)[:, None] & (at < count)[None, :]
        cells = memory + (half + ranks[:, None] * most + at[None, :])
        words = tl.load(cells, is_valid, 0, volatile=True)
        missing = tl.sum(tl.sum((is_valid & ((words >> 32) != turn)).to(tl.int32), 0), 0)
        while (missing > 0) & (polls_left > 0):
            words = tl.load(cells, is_valid, 0, volatile=True)
            missing = tl.sum(tl.sum((is_valid & ((words >> 32) != turn)).to(tl.int32), 0), 0)
            polls_left = tl.where(tl.load(lost, volatile=True) == 0, polls_left - 1, 0)
        if missing > 0:
            tl.store(lost, 1)
        numbers = words.to(tl.int32).to(tl.float32, bitcast=True)
        total = tl.sum(tl.where(is_valid, numbers, 0.0), 0) + tl.load(x + at, at < count, 0).to(tl.float32)
        total = tl.where(missing > 0, float("nan"), total)
        tl.store(x + at, total.to(x.dtype.element_ty), at < count)
    tl.debug_barrier()  # all have read it
    tl.store(turns + program, turn)


def all_reduce_add(
    x: Tensor, part: Tensor, memory: Tensor, addresses: Tensor, rank: int, turns: Tensor, lost: Tensor
) -> None:
    """Add the sum of all processes' parts to x.

    A process whose part does not arrive within half a minute counts as lost: from then on x is NaN.

    Args:
        x: contiguous; overwritten.
        part: contiguous, as many numbers as x.
        memory: int64 [2 * processes * most], this process's, 0 at first.
        addresses: int64 [processes], of all processes' memory.
        rank: of this process.
        turns: int32 [PROGRAMS], 0 at first: how many sums each program has made.
        lost: int32 [1], 0 at first; any other value ends all waiting.
    """
    size = len(addresses)
    has_pdl = uses_pdl(x.device)
    _all_reduce_add[(PROGRAMS,)](
        x, part, memory, addresses, turns, lost, x.numel(), rank, len(memory) // (2 * size),
        size=size, padded=triton.next_power_of_2(size), block=_BLOCK, programs=PROGRAMS, patience=PATIENCE,
        uses_pdl=has_pdl, num_warps=4, launch_pdl=has_pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=("columns", "first", "rank"))
def _all_reduce_argmax(
    tokens, ids, logits, memory, addresses, turns, lost, columns, first, rank, most, not_finite,
    size: tl.constexpr, padded: tl.constexpr, patience: tl.constexpr, uses_pdl: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    ranks = tl.arange(0, padded)
    is_valid = ranks < size
    peers = tl.load(addresses + ranks, is_valid, 0).to(tl.pointer_type(tl.int64))
    if uses_pdl:
        gdc_wait()
        gdc_launch_dependents()
    turn = tl.load(turns + row) + 1
    polls_left = tl.where(tl.load(lost, volatile=True) == 0, patience, 0)
    own_token = tl.load(tokens + row)
    value = tl.load(logits + row.to(tl.int64) * columns + tl.maximum(own_token, 0))
    token = tl.where(own_token == not_finite, not_finite, own_token + first)
    stamp = turn.to(tl.int64) << 32
    # A value and its token, of every rank: [2 halves, ranks, rows, 2].
    half = (turn & 1) * size
    at = ((half + rank) * most + row) * 2
    tl.store(peers + at, stamp | (value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) + ranks * 0, is_valid)
    tl.store(peers + at + 1, stamp | (token & 0xFFFFFFFF) + ranks * 0, is_valid)
    cells = memory + ((half + ranks) * most + row) * 2
    values = tl.load(cells, is_valid, 0, volatile=True)
    found = tl.load(cells + 1, is_valid, 0, volatile=True)
    missing = tl.sum((is_valid & (((values >> 32) != turn) | ((found >> 32) != turn))).to(tl.int32), 0)
    while (missing > 0) & (polls_left > 0):
        values = tl.load(cells, is_valid, 0, volatile=True)
        found = tl.load(cells + 1, is_valid, 0, volatile=True)
        missing = tl.sum((is_valid & (((values >> 32) != turn) | ((found >> 32) != turn))).to(tl.int32), 0)
        polls_left = tl.where(tl.load(lost, volatile=True) == 0, polls_left - 1, 0)
    if missing > 0:
        tl.store(lost, 1)
    numbers = tl.where(is_valid, values.to(tl.int32).to(tl.float32, bitcast=True), -float("inf"))
    candidates = found.to(tl.int32)  # a token that is not finite is below all others
    is_best = is_valid & (numbers == tl.max(numbers, 0))
    best = tl.min(tl.where(is_best, candidates, 0x7FFFFFFF), 0)
    is_lost = (tl.min(tl.where(is_valid, candidates, 0), 0) < 0) | (missing > 0)
    tl.store(tokens + row, tl.where(is_lost, not_finite, best).to(tl.int64))
    tl.store(ids + row, tl.where(is_lost, 0, best).to(tl.int64))
    tl.debug_barrier()
    tl.store(turns + row, turn)


def all_reduce_argmax(
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
    """Replace each row's argmax of this rank by that of all ranks.

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
    has_pdl = uses_pdl(logits.device)
    _all_reduce_argmax[(len(tokens),)](
        tokens, ids, logits, memory, addresses, turns, lost, logits.shape[1], first, rank, len(turns), NOT_FINITE,
        size=size, padded=triton.next_power_of_2(size), patience=PATIENCE, uses_pdl=has_pdl,
        num_warps=1, launch_pdl=has_pdl,
    )  # fmt: skip
