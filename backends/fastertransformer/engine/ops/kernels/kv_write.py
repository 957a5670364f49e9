"""Write keys and values of many tokens to their pages; queries and keys are normed and rotated on the way."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..linear import HeadNorms
from ..positions import Rotary
from .elements import cos_sin, rotary_factors
from .fp8_cells import codes_for, exponent_for, fp8_kind, keep_cells

_BLOCK = 2048  # numbers that a program holds at a time
_MANY_TOKENS = 512  # fill the GPU by one program each


@triton.jit
def _turned(
    x, head_stride, gain, head, dim, other, cos, sin, is_in, is_rotated, eps,
    size: tl.constexpr, rotation: tl.constexpr, has_norm: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the numbers of heads, in fp32, and round them once."""
    own = tl.load(x + head * head_stride + dim, is_in, 0)
    y = own.to(tl.float32)
    if has_norm:
        factor = tl.rsqrt(tl.sum(y * y, 1) / size + eps)[:, None]
        y *= factor * tl.load(gain + dim, dim < size, 0).to(tl.float32)
    if rotation != 0:
        partner = tl.load(x + head * head_stride + other, is_in & is_rotated, 0).to(tl.float32)
        if has_norm:
            partner *= factor * tl.load(gain + other, is_rotated, 0).to(tl.float32)
        y = y * cos + partner * sin
    return y.to(own.dtype)


@triton.jit
def _keep_halves(target, exponents, first, second, head, stride, dim, is_in, half: tl.constexpr, fp8: tl.constexpr):
    """Write both halves of heads to their cells; of FP8 the exponents too."""
    if fp8:
        a, b = first.to(tl.float32), second.to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)) + tl.sum((a + b) * 0.0, 1)
        found = exponent_for(most)[:, None]
        tl.store(exponents + head * stride + dim * 0, found.to(tl.uint8), is_in & (dim == 0))
        first, second = codes_for(a, found), codes_for(b, found)
    tl.store(target + head * stride + dim, first, is_in)
    tl.store(target + head * stride + half + dim, second, is_in)


@triton.jit
def _turn_halves(
    x, target, exponents, head_stride, target_stride, gain, head, dim, cos, sin, is_in, eps, half: tl.constexpr,
    has_norm: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    """Norm and rotate heads of twice ``half`` numbers, whose halves turn together; store them back, and to a target."""
    first = tl.load(x + head * head_stride + dim, is_in, 0)
    second = tl.load(x + head * head_stride + half + dim, is_in, 0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if has_norm:
        factor = tl.rsqrt(tl.sum(a * a + b * b, 1) / (2 * half) + eps)[:, None]
        a *= factor * tl.load(gain + dim).to(tl.float32)
        b *= factor * tl.load(gain + half + dim).to(tl.float32)
    turned, other = (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)
    tl.store(x + head * head_stride + dim, turned, is_in)
    tl.store(x + head * head_stride + half + dim, other, is_in)
    if target is not None:
        _keep_halves(target, exponents, turned, other, head, target_stride, dim, is_in, half, fp8)


@triton.jit(do_not_specialize=("positions",))
def _kv_write_halves(
    q, k, v, kv, pages, offsets, positions, frequencies, q_gain, k_gain,
    q_stride, q_head_stride, token_stride, head_stride, page_stride, values_at, eps, factor,
    page_tokens: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, half: tl.constexpr, many: tl.constexpr,
    has_norm: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    """Do as _kv_write for heads that rotate as a whole, by halves: both are read in the order in which they lie.

    A program has ``many`` heads of a token: of the queries, or after these of the keys and values.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, half)[None, :]
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + dim)
    cos, sin = cos_sin(angle)
    cos, sin = cos * factor, sin * factor
    queries: tl.constexpr = (heads + many - 1) // many
    lane = tl.arange(0, many)[:, None]
    if part < queries:
        head = part * many + lane
        is_in = (head < heads) & (dim < half)
        _turn_halves(
            q + token * q_stride, None, None, q_head_stride, 0, q_gain, head, dim, cos, sin, is_in, eps, half,
            has_norm, 0,
        )  # fmt: skip
    else:
        head = (part - queries) * many + lane
        is_in = (head < kv_heads) & (dim < half)
        page, offset = tl.load(pages + token).to(tl.int64) * page_stride, tl.load(offsets + token)
        cell, exponents = page + offset * (2 * half), kv + page + page_tokens * 2 * half + offset
        stride: tl.constexpr = page_tokens * (2 * half + 1 if fp8 else 2 * half)
        _turn_halves(
            k + token * token_stride, kv + cell, exponents, head_stride, stride, k_gain, head, dim, cos, sin, is_in,
            eps, half, has_norm, fp8,
        )  # fmt: skip
        own = v + token * token_stride + head * head_stride + dim
        first, second = tl.load(own, is_in, 0), tl.load(own + half, is_in, 0)
        _keep_halves(kv + values_at + cell, exponents + values_at, first, second, head, stride, dim, is_in, half, fp8)


# Triton would compile again for arguments that differ between calls: for positions too, which after an odd number of
# tokens do not begin at a multiple of 16 bytes.
@triton.jit(do_not_specialize=("rotary_size", "positions"))
def _kv_write(
    q, k, v, kv, pages, offsets, positions, frequencies, q_gain, k_gain,
    q_stride, q_head_stride, token_stride, head_stride, page_stride, values_at, rotary_size, eps, factor,
    page_tokens: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    many: tl.constexpr, blocks: tl.constexpr, rotation: tl.constexpr, has_norm: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    """Write keys and values of a token; q and k are overwritten where they are normed or rotated.

    A program does so for ``blocks`` times ``many`` heads: with more than one it computes the rotation once for all.
    """
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, width)[None, :]
    k += token * token_stride
    v += token * token_stride
    page, offset = tl.load(pages + token).to(tl.int64) * page_stride, tl.load(offsets + token)
    cell = page + offset * size
    stride: tl.constexpr = page_tokens * (size + 1 if fp8 else size)
    other, cos, sin, is_rotated = dim, 1.0, 0.0, dim < size
    if rotation != 0:
        position = tl.load(positions + token)
        other, cos, sin, is_rotated = rotary_factors(dim, position, rotary_size, frequencies, factor, rotation)
    for block in range(blocks):
        head = ((tl.program_id(1) * blocks + block) * many + tl.arange(0, many))[:, None]
        is_kv = (head < kv_heads) & (dim < size)
        if (rotation == 0) & (not has_norm):
            key = tl.load(k + head * head_stride + dim, is_kv, 0)
        else:
            own, is_query = q + token * q_stride, (head < heads) & (dim < size)
            query = _turned(
                own, q_head_stride, q_gain, head, dim, other, cos, sin, is_query, is_rotated, eps, size, rotation,
                has_norm,
            )  # fmt: skip
            key = _turned(
                k, head_stride, k_gain, head, dim, other, cos, sin, is_kv, is_rotated, eps, size, rotation, has_norm
            )
            tl.debug_barrier()  # all threads have read what is overwritten
            tl.store(own + head * q_head_stride + dim, query, is_query)
            tl.store(k + head * head_stride + dim, key, is_kv)
        place, value = kv + cell + head * stride + dim, tl.load(v + head * head_stride + dim, is_kv, 0)
        if fp8:
            every = (tl.program_id(1) * blocks + block) * many + tl.arange(0, many)
            exponents = kv + page + page_tokens * size + offset + every * stride
            keep_cells(place, exponents, key.to(tl.float32), is_kv, every < kv_heads)
            keep_cells(place + values_at, exponents + values_at, value.to(tl.float32), is_kv, every < kv_heads)
        else:
            tl.store(place, key, is_kv)
            tl.store(place + values_at, value, is_kv)


def kv_write(k: Tensor, v: Tensor, kv: Tensor, pages: Tensor, offsets: Tensor) -> None:
    """Write k and v, [Hkv, T, D], whose last axis has no gaps, to a layer's cache; see Ops.kv_write."""
    rotate_and_write(k, k, v, kv, pages, offsets, offsets, None)


def rotate_and_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    pages: Tensor,
    offsets: Tensor,
    positions: Tensor,
    rotary: Rotary | None,
    norms: HeadNorms | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate queries and keys in place, and write keys and values to a layer's cache; see Ops.kv_write.

    Args:
        q: [H, T, D]; the last axis without gaps. Overwritten, if there is anything to do.
        k: [Hkv, T, D], as q.
        v: as k.
        kv: a layer's cache, [2, pages, Hkv, PAGE, D].
        pages: int32 [T].
        offsets: int64 [T], place of each token in its page.
        positions: int64 [T].
        rotary: how to rotate; None: nothing is rotated.
        norms: RMS norms with one epsilon, before the rotation; None: none.

    Returns:
        q, k and v; copies of k and v, if their numbers lay differently.
    """
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    (heads, tokens, size), kv_heads = q.shape, len(k)
    if rotary and not rotary.is_by_pairs and rotary.width == size and size & (size - 1) == 0:
        many = min(triton.next_power_of_2(heads), max(1, _BLOCK // size))
        _kv_write_halves[(tokens, triton.cdiv(heads, many) + triton.cdiv(kv_heads, many))](
            q, k, v, kv, pages, offsets, positions, rotary.inverse_frequencies,
            norms.query.weight if norms else None, norms.key.weight if norms else None,
            q.stride(1), q.stride(0), k.stride(1), k.stride(0), kv.stride(1), kv.stride(0),
            norms.query.eps if norms else 0.0, rotary.factor, page_tokens=kv.shape[3], heads=heads, kv_heads=kv_heads,
            half=size // 2, many=many, has_norm=norms is not None, fp8=fp8_kind(kv), num_warps=4,
        )  # fmt: skip
        return q, k, v
    width, most = triton.next_power_of_2(size), heads if rotary or norms else kv_heads
    many = min(triton.next_power_of_2(most), max(1, _BLOCK // width))
    parts = triton.cdiv(most, many)
    blocks = parts if tokens >= _MANY_TOKENS else 1
    _kv_write[(tokens, parts // blocks)](
        q, k, v, kv, pages, offsets, positions, rotary.inverse_frequencies if rotary else None,
        norms.query.weight if norms else None, norms.key.weight if norms else None,
        q.stride(1), q.stride(0), k.stride(1), k.stride(0), kv.stride(1), kv.stride(0),
        rotary.width if rotary else 0, norms.query.eps if norms else 0.0, rotary.factor if rotary else 1.0,
        page_tokens=kv.shape[3], heads=heads, kv_heads=kv_heads, size=size, width=width, many=many,
        blocks=blocks, rotation=0 if rotary is None else 1 if rotary.is_by_pairs else 2, has_norm=norms is not None,
        fp8=fp8_kind(kv), num_warps=4,
    )  # fmt: skip
    return q, k, v
