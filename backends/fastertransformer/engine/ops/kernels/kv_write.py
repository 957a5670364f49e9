"""Write keys and values of many tokens to their pages; rotary positions are applied on the way."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...model.positions import Rotary
from .elements import rotary_factors

_BLOCK = 2048


@triton.jit
def _rotated(x, source, beside, cos, sin, is_in, is_rotated):
    """Rotate numbers of heads with their partners, in their own type."""
    own = tl.load(x + source, is_in, 0)
    other = tl.load(x + beside, is_rotated, 0).to(tl.float32)
    return (own.to(tl.float32) * cos + other * sin).to(own.dtype)


# Triton would compile again for arguments that differ between calls: for positions too, which after an odd number of
# tokens do not begin at a multiple of 16 bytes.
@triton.jit(do_not_specialize=("token_stride", "keys_at", "rotary_size", "positions"))
def _kv_write(
    q, k, v, rotated, memory, pages, offsets, positions,
    token_stride, head_stride, page_stride, values_at, keys_at, rotary_size, log2_base,
    page_tokens: tl.constexpr, heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr, many: tl.constexpr,
    rotation: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * many + tl.arange(0, many))[:, None]
    dim = tl.arange(0, width)[None, :]
    is_in = (head < heads) & (dim < size)
    source = token * token_stride + head * head_stride
    if rotation == 0:
        key = tl.load(k + source + dim, is_in, 0)
    else:
        position = tl.load(positions + token)
        other, cos, sin, is_rotated = rotary_factors(dim, position, rotary_size, log2_base, rotation)
        is_rotated = is_in & is_rotated
        target = token * heads * size + head * size + dim
        query = _rotated(q, source + dim, source + other, cos, sin, is_in, is_rotated)
        key = _rotated(k, source + dim, source + other, cos, sin, is_in, is_rotated)
        tl.store(rotated + target, query, is_in)
        tl.store(rotated + keys_at + target, key, is_in)
    cell = tl.load(pages + token).to(tl.int64) * page_stride + tl.load(offsets + token) * size
    place = memory + cell + head * page_tokens * size + dim
    tl.store(place, key, is_in)
    tl.store(place + values_at, tl.load(v + source + dim, is_in, 0), is_in)


def kv_write(k: Tensor, v: Tensor, memory: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Write k and v, [H, T, D], whose last axis has no gaps, to a layer's memory; see Ops.kv_write."""
    rotate_and_write(k, k, v, memory, pages, offsets, offsets, None)


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    pages: Tensor,
    offsets: Tensor,
    positions: Tensor,
    rotary: Rotary | None,
) -> Tensor:
    """Rotate queries and keys, [H, T, D] each, and write keys and values to a layer's memory; see Ops.kv_write.

    Args:
        q: the last axis without gaps.
        k: as q.
        v: as q.
        memory: of a layer, [2, pages, H, PAGE, D].
        pages: int32 [T].
        offsets: int64 [T], place of each token in its page.
        positions: int64 [T].
        rotary: how to rotate; None: nothing is rotated.

    Returns:
        Rotated queries and keys, [2, H, T, D]; no tokens where nothing is rotated.
    """
    heads, tokens, size = k.shape
    if not q.stride() == k.stride() == v.stride():
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    rotated = torch.empty((2, tokens if rotary else 0, heads, size), dtype=k.dtype, device=k.device)
    width = triton.next_power_of_2(size)
    many = min(triton.next_power_of_2(heads), max(1, _BLOCK // width))
    _kv_write[(tokens, triton.cdiv(heads, many))](
        q, k, v, rotated, memory, pages, offsets, positions,
        k.stride(1), k.stride(0), memory.stride(1), memory.stride(0), rotated.stride(0),
        rotary.width if rotary else 0, math.log2(rotary.base) if rotary else 0.0,
        page_tokens=memory.shape[3], heads=heads, size=size, width=width, many=many,
        rotation=0 if rotary is None else 1 if rotary.is_by_pairs else 2, num_warps=4,
    )  # fmt: skip
    return rotated.transpose(1, 2)
