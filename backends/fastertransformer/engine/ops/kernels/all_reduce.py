"""The sum of what several GPUs have, each of which writes its part into all others' memory.

A number travels with the count of the sum that it belongs to, in 8 bytes that are written at once (NCCL's protocol for
short messages does the same). So nobody waits for a signal: who finds the right count beside a number has the number.
Every GPU adds up in the order of the ranks. The memory has two halves, used by turns: who writes to a half for the sum
after the next has seen everybody's part of the next one, so everybody has read that half.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode_attention import abilities

PROGRAMS, _BLOCK = 128, 256  # the same in every sum: each program counts them by itself
PATIENCE = 1 << 25  # times that a program looks, about half a minute


@triton.jit(do_not_specialize=("count", "rank"))
def _add(
    x, part, memory, addresses, turns, lost, count, rank, most,
    size: tl.constexpr, padded: tl.constexpr, block: tl.constexpr, programs: tl.constexpr, patience: tl.constexpr,
    is_chained: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    ranks = tl.arange(0, padded)
    theirs = tl.load(addresses + ranks, ranks < size, 0)
    if is_chained:
        gdc_launch_dependents()
        gdc_wait()
    turn = tl.load(turns + program) + 1
    looks = tl.where(tl.load(lost, volatile=True) == 0, patience, 0)
    half = (turn & 1) * (size * most)
    for start in range(program * block, count, programs * block):
        at = start + tl.arange(0, block)
        bits = tl.load(part + at, at < count, 0).to(tl.float32).to(tl.int32, bitcast=True)
        words = (bits.to(tl.int64) & 0xFFFFFFFF) | (turn.to(tl.int64) << 32)
        places = theirs[:, None].to(tl.pointer_type(tl.int64)) + (half + rank * most + at)[None, :]
        is_there = (ranks < size)[:, None] & (at < count)[None, :]
        tl.store(places, tl.broadcast_to(words[None, :], (padded, block)), is_there)
    for start in range(program * block, count, programs * block):
        at = start + tl.arange(0, block)
        is_there = (ranks < size)[:, None] & (at < count)[None, :]
        places = memory + (half + ranks[:, None] * most + at[None, :])
        words = tl.load(places, is_there, 0, volatile=True)
        missing = tl.sum(tl.sum((is_there & ((words >> 32) != turn)).to(tl.int32), 0), 0)
        while (missing > 0) & (looks > 0):
            words = tl.load(places, is_there, 0, volatile=True)
            missing = tl.sum(tl.sum((is_there & ((words >> 32) != turn)).to(tl.int32), 0), 0)
            looks = tl.where(tl.load(lost, volatile=True) == 0, looks - 1, 0)
        if missing > 0:
            tl.store(lost, 1)
        numbers = words.to(tl.int32).to(tl.float32, bitcast=True)
        total = tl.sum(tl.where(is_there, numbers, 0.0), 0) + tl.load(x + at, at < count, 0).to(tl.float32)
        total = tl.where(missing > 0, float("nan"), total)
        tl.store(x + at, total.to(x.dtype.element_ty), at < count)
    tl.debug_barrier()  # all have read it
    tl.store(turns + program, turn)


def add_parts(
    x: Tensor, part: Tensor, memory: Tensor, addresses: Tensor, rank: int, turns: Tensor, lost: Tensor
) -> None:
    """Add the sum of all processes' parts to x.

    Where another process does not come for half a minute it is taken for lost: x is NaN then and from then on.

    Args:
        x: contiguous; overwritten.
        part: likewise, of as many numbers.
        memory: int64 [2 * processes * most], this process's, 0 at first.
        addresses: int64 [processes], of all processes' memory.
        rank: of this process.
        turns: int32 [PROGRAMS], 0 at first: how many sums each program has made.
        lost: int32 [1], 0 at first; anything else ends all waiting.
    """
    size = len(addresses)
    is_chained = abilities(x.device)
    _add[(PROGRAMS,)](
        x, part, memory, addresses, turns, lost, x.numel(), rank, len(memory) // (2 * size),
        size=size, padded=triton.next_power_of_2(size), block=_BLOCK, programs=PROGRAMS, patience=PATIENCE,
        is_chained=is_chained, num_warps=4, launch_pdl=is_chained,
    )  # fmt: skip
