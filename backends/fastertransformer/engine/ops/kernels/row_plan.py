"""In which order the rows of a step attend: the longest first, so that no program begins with one when others end.

Rows keep their order from the first layer of a pass to the last, so it is found once. What a program must know of its
row stands beside it: looked up by row, it would take one load after another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 64
FIELDS = 5
_UNLIMITED = tl.constexpr(1 << 31)


@triton.jit
def _rows_at(positions, windows, slots, ends, index, count, is_packed: tl.constexpr, block: tl.constexpr):
    """Return token, slot, position (-1: the row does not attend) and window of some rows, int64."""
    is_row = index < count
    token, slot, window = index.to(tl.int64), index.to(tl.int64), tl.full((block,), _UNLIMITED, tl.int64)
    if is_packed:
        token = tl.load(ends + index, is_row, 0).to(tl.int64)
        is_row = is_row & (tl.load(ends + index + 1, is_row, 0) - token == 1)
        slot = tl.load(slots + token, is_row, 0).to(tl.int64)
    else:
        window = tl.load(windows + index, is_row, _UNLIMITED)
    return token, slot, tl.load(positions + token, is_row, -1), window


@triton.jit(do_not_specialize=("count", "positions", "slots"))
def _plan_rows(positions, windows, slots, ends, plan, count, is_packed: tl.constexpr, block: tl.constexpr):
    own = tl.program_id(0) * block + tl.arange(0, block)
    token, slot, position, window = _rows_at(positions, windows, slots, ends, own, count, is_packed, block)
    length = tl.minimum(position + 1, window).to(tl.int32)
    rank, total = tl.zeros((block,), tl.int32), tl.zeros((block,), tl.int64)
    for first in range(0, count, block):
        others = first + tl.arange(0, block)
        _, _, where, limit = _rows_at(positions, windows, slots, ends, others, count, is_packed, block)
        theirs = tl.where(others < count, tl.minimum(where + 1, limit), -1).to(tl.int32)
        is_ahead = (theirs[None, :] > length[:, None]) | (
            (theirs[None, :] == length[:, None]) & (others[None, :] < own[:, None])
        )
        rank += tl.sum(is_ahead.to(tl.int32), 1)
        total += tl.maximum(theirs, 0)
    is_own = own < count
    tl.store(plan + rank, own.to(tl.int64), is_own)
    tl.store(plan + count + rank, token, is_own)
    tl.store(plan + 2 * count + rank, slot, is_own)
    tl.store(plan + 3 * count + rank, position, is_own)
    tl.store(plan + 4 * count + rank, window, is_own)
    if tl.program_id(0) == 0:
        tl.store(plan + 5 * count, tl.sum(total, 0))


def plan_rows(
    positions: Tensor, windows: Tensor | None, slots: Tensor | None = None, ends: Tensor | None = None
) -> Tensor:
    """Order the rows of a step by how many cells they attend to.

    Args:
        positions: int64 [B], of packed rows [T].
        windows: int64 [B]; see kv_cache.py. None: no row has one.
        slots: of packed rows, int64 [T]; else a row's slot is its number.
        ends: of packed rows, int32 [B + 1]. Those of one token attend.

    Returns:
        int64 [5 B + 1]: by place in the order the row, its token, slot, position (-1: it does not attend) and window;
        and the cells of all rows.
    """
    count = len(positions) if ends is None else len(ends) - 1
    plan = torch.empty(FIELDS * count + 1, dtype=torch.long, device=positions.device)
    _plan_rows[(triton.cdiv(count, _BLOCK),)](
        positions, windows, slots, ends, plan, count, is_packed=ends is not None, block=_BLOCK, num_warps=4
    )
    return plan
