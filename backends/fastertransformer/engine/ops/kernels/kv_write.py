"""Keys and values of many tokens go to their pages; where positions turn queries and keys, that happens on the way."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...model.positions import Rotary

_BLOCK = 2048


@triton.jit
def _turned(x, source, beside, cos, sin, is_in, is_turned):
    """Numbers of heads, turned with those beside them, in their own type."""
    own = tl.load(x + source, is_in, 0)
    other = tl.load(x + beside, is_turned, 0).to(tl.float32)
    return (own.to(tl.float32) * cos + other * sin).to(own.dtype)


# What differs from call to call would be compiled for anew: so would positions, which of an odd number of tokens do not
# begin at a multiple of 16 bytes.
@triton.jit(do_not_specialize=("token_stride", "turned_at", "rotary_size", "positions"))
def _keep(
    q, k, v, turned, memory, pages, offsets, positions,
    token_stride, head_stride, page_stride, values_at, turned_at, rotary_size, log2_base,
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
        # What each number is turned with stands beside it (by pairs), or half of the turned numbers further.
        half = rotary_size // 2
        if rotation == 1:
            other, angle, sign = tl.where(dim % 2 == 0, dim + 1, dim - 1), dim // 2, tl.where(dim % 2 == 0, -1.0, 1.0)
        else:
            other, angle = tl.where(dim < half, dim + half, dim - half), dim % half
            sign = tl.where(dim < half, -1.0, 1.0)
        is_turned = is_in & (dim < rotary_size)
        position = tl.load(positions + token).to(tl.float32)
        turn = position * tl.exp2(angle.to(tl.float32) * (-2.0 * log2_base / rotary_size))
        cos = tl.where(dim < rotary_size, tl.cos(turn), 1.0)
        sin = tl.where(dim < rotary_size, tl.sin(turn), 0.0) * sign
        target = token * heads * size + head * size + dim
        query = _turned(q, source + dim, source + other, cos, sin, is_in, is_turned)
        key = _turned(k, source + dim, source + other, cos, sin, is_in, is_turned)
        tl.store(turned + target, query, is_in)
        tl.store(turned + turned_at + target, key, is_in)
    cell = tl.load(pages + token).to(tl.int64) * page_stride + tl.load(offsets + token) * size
    place = memory + cell + head * page_tokens * size + dim
    tl.store(place, key, is_in)
    tl.store(place + values_at, tl.load(v + source + dim, is_in, 0), is_in)


def keep(k: Tensor, v: Tensor, memory: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Keep tokens.

    Args:
        k: [H, T, D]; the last axis without gaps.
        v: likewise.
        memory: of a layer, [2, pages, H, PAGE, D].
        pages: int32 [T].
        offsets: int64 [T], place of each token in its page.
    """
    _launch(k, k, v, memory, pages, offsets, offsets, None)


def turn_and_keep(
    q: Tensor, k: Tensor, v: Tensor, memory: Tensor, pages: Tensor, offsets: Tensor, positions: Tensor, rotary: Rotary
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys, and keep the latter; see keep.

    Args:
        q: [H, T, D].
        k: likewise.
        v: likewise.
        memory: see keep.
        pages: see keep.
        offsets: see keep.
        positions: int64 [T].
        rotary: how.

    Returns:
        Queries and keys, turned, [H, T, D] each.
    """
    turned = _launch(q, k, v, memory, pages, offsets, positions, rotary)
    return turned[0].transpose(0, 1), turned[1].transpose(0, 1)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    pages: Tensor,
    offsets: Tensor,
    positions: Tensor,
    rotary: Rotary | None,
) -> Tensor:
    """Do either; give what was turned, [2, T, H, D]."""
    heads, tokens, size = k.shape
    if not q.stride() == k.stride() == v.stride():
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    turned = torch.empty((2, tokens, heads, size) if rotary else (2, 0), dtype=k.dtype, device=k.device)
    width = triton.next_power_of_2(size)
    many = min(triton.next_power_of_2(heads), max(1, _BLOCK // width))
    _keep[(tokens, triton.cdiv(heads, many))](
        q, k, v, turned, memory, pages, offsets, positions,
        k.stride(1), k.stride(0), memory.stride(1), memory.stride(0), turned.stride(0),
        rotary.width if rotary else 0, math.log2(rotary.base) if rotary else 0.0,
        page_tokens=memory.shape[3], heads=heads, size=size, width=width, many=many,
        rotation=0 if rotary is None else 1 if rotary.is_by_pairs else 2, num_warps=4,
    )  # fmt: skip
    return turned
