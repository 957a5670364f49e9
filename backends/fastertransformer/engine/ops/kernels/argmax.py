"""The end of a greedy step: each row's likeliest token, and where the row goes on.

A row's columns are shared by several programs, of which the last to finish puts their finds together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...sampling.sampling import NOT_FINITE
from .decode_attention import abilities, scratch_of

_PARTS = 32  # programs of a row


@triton.jit(do_not_specialize=("columns",))
def _take(
    logits, ids, positions, tokens, partial, finished, columns, lost,
    parts: tl.constexpr, block: tl.constexpr, is_chained: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_chained:
        gdc_launch_dependents()
        gdc_wait()
    share = tl.cdiv(tl.cdiv(columns, parts), block) * block
    most, best = -float("inf"), columns
    for first in range(part * share, tl.minimum((part + 1) * share, columns), block):
        at = first + tl.arange(0, block)
        values = tl.load(logits + row * columns + at, at < columns, -float("inf"))
        highest = tl.max(values, 0)
        place = tl.min(tl.where(values == highest, at, columns), 0)
        best = tl.where(highest > most, place, best)
        most = tl.maximum(most, highest)
    mine = partial + row * parts * 2
    tl.store(mine + part, most)
    tl.store(mine + parts + part, best.to(tl.float32, bitcast=True))
    tl.debug_barrier()
    if tl.atomic_add(finished + row, 1, sem="acq_rel", scope="gpu") != parts - 1:
        return
    those = tl.arange(0, parts)
    values = tl.load(mine + those, cache_modifier=".cg")
    places = tl.load(mine + parts + those, cache_modifier=".cg").to(tl.int32, bitcast=True)
    best = tl.min(tl.where(values == tl.max(values, 0), places, columns), 0)
    best = tl.minimum(best, columns - 1)  # of NaN, which is lost
    first_value = tl.load(logits + row * columns)
    is_finite = tl.abs(first_value) < float("inf")
    tl.store(tokens + row, tl.where(is_finite, best, lost).to(tl.int64))
    tl.store(ids + row, best.to(tl.int64))
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(finished + row, 0)


def take_likeliest(logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
    """Choose, have the next step begin with what was chosen, and go on by a position.

    Args:
        logits: fp32 [B, V], contiguous.
        ids: int64 [B]; takes the tokens.
        positions: int64 [B]; each is raised by 1.

    Returns:
        int64 [B]; see sampling.argmax.
    """
    rows, columns = logits.shape
    partial, finished = scratch_of(logits.device).get(rows, rows * _PARTS * 2)
    tokens = torch.empty_like(ids)
    is_chained = abilities(logits.device)
    _take[(rows, _PARTS)](
        logits, ids, positions, tokens, partial, finished, columns, NOT_FINITE,
        parts=_PARTS, block=1024, is_chained=is_chained, num_warps=4, launch_pdl=is_chained,
    )  # fmt: skip
    return tokens
