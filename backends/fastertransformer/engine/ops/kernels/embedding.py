"""The beginning of a step: each row's token and position, as numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .decode_attention import abilities

_BLOCK = 1024


@triton.jit(do_not_specialize=("last",))
def _embed(
    out, ids, positions, tokens, places, width, last,
    has_places: tl.constexpr, block: tl.constexpr, is_chained: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    if is_chained:
        # In this order: the kernels behind this one may read what the step before has left without waiting for it.
        gdc_wait()
        gdc_launch_dependents()
    is_in = at < width
    numbers = tl.load(tokens + tl.load(ids + row) * width + at, is_in)
    if has_places:
        place = tl.minimum(tl.load(positions + row), last)
        numbers += tl.load(places + place * width + at, is_in)
    tl.store(out + row.to(tl.int64) * width + at, numbers, is_in)


def embed(ids: Tensor, positions: Tensor, tokens: Tensor, places: Tensor | None) -> Tensor:
    """Look up tokens and positions and add them.

    Args:
        ids: int64 [B].
        positions: int64 [B]; those behind the table's last count as the last.
        tokens: [V, width].
        places: [positions, width], of the same type; None: there are none.

    Returns:
        [B, width].
    """
    width = tokens.shape[1]
    ids, positions = ids.contiguous(), positions.contiguous()
    out = torch.empty(len(ids), width, dtype=tokens.dtype, device=tokens.device)
    is_chained = abilities(tokens.device)
    _embed[(len(ids), triton.cdiv(width, _BLOCK))](
        out, ids, positions, tokens, places, width, 0 if places is None else len(places) - 1,
        has_places=places is not None, block=_BLOCK, is_chained=is_chained, num_warps=4, launch_pdl=is_chained,
    )  # fmt: skip
    return out
