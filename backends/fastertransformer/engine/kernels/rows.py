"""Attention of whole rows with a bias by distance, many tokens at once: an encoder's, or that of contexts.

Flash attention (Dao 2023): a program takes some queries of a row and a head, and goes over the row's keys. The bias is
not read from a mask as large as the scores: ALiBi's is computed, T5's is looked up by distance, and beyond the furthest
distance that has a number of its own, where most keys of a long row are, it is one number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention import NO_BIAS, SLOPES

_LOG2_E = 1.4426950408889634
_TILES, _SMALL_TILES = (64, 32, 4, 3), (32, 32, 4, 2)  # queries and keys of a program at a time, warps, stages


@triton.jit
def _over_keys(
    sums, total, most, query, k, v, bias, m, start, end, length, token_stride, far, scale,
    size: tl.constexpr, width: tl.constexpr, block_n: tl.constexpr, kind: tl.constexpr, is_near: tl.constexpr,
    is_causal: tl.constexpr,
):  # fmt: skip
    """Attend to keys from start to end; is_near: whether T5's bias differs between them."""
    dims = tl.arange(0, width)
    for first in range(start, end, block_n):
        n = first + tl.arange(0, block_n)
        is_in = (n < length)[:, None] & (dims < size)[None, :]
        at = n.to(tl.int64)[:, None] * token_stride + dims[None, :]
        keys = tl.load(k + at, is_in, 0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale  # has log2(e) in it
        distance = n[None, :] - m[:, None]
        if kind == 1:
            scores += tl.load(bias) * distance * 1.4426950408889634
        if kind == 2:
            if is_near:
                near = tl.minimum(tl.maximum(distance, -far), far) + far
                scores += tl.load(bias + near) * 1.4426950408889634
            else:
                scores += tl.load(bias + tl.where(first < tl.min(m, 0), 0, 2 * far)) * 1.4426950408889634
        is_seen = (n < length)[None, :]
        if is_causal:
            is_seen = is_seen & (distance <= 0)
        scores = tl.where(is_seen, scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(most - higher)
        total = total * fade + tl.sum(weights, 1)
        values = tl.load(v + at, is_in, 0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
        most = higher
    return sums, total, most


@triton.jit(do_not_specialize=("far",))
def _attend_rows(
    q, k, v, out, begins, lengths, bias, token_stride, head_stride, out_stride, scale, far,
    size: tl.constexpr, width: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, kind: tl.constexpr,
    is_causal: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    start = tl.program_id(0) * block_m
    if start >= length:
        return
    begin = tl.load(begins + row).to(tl.int64)
    origin = begin * token_stride + head * head_stride
    m, dims = start + tl.arange(0, block_m), tl.arange(0, width)
    is_in = (m < length)[:, None] & (dims < size)[None, :]
    query = tl.load(q + origin + m.to(tl.int64)[:, None] * token_stride + dims[None, :], is_in, 0.0)
    if kind == 1:
        bias += head
    if kind == 2:
        bias += head * (2 * far + 1)
    sums = tl.zeros([block_m, width], tl.float32)
    total = tl.zeros([block_m], tl.float32)
    most = tl.full([block_m], -1e30, tl.float32)
    end = tl.minimum(length, start + block_m) if is_causal else length
    k += origin
    v += origin
    near, behind = 0, end
    if kind == 2:
        # Blocks of keys all of which are further before all queries, or further behind.
        near = tl.maximum(start - far + 1, 0) // block_n * block_n
        behind = tl.minimum(tl.cdiv(start + block_m + far - 1, block_n) * block_n, end)
        sums, total, most = _over_keys(
            sums, total, most, query, k, v, bias, m, 0, near, length, token_stride, far, scale,
            size, width, block_n, kind, False, is_causal,
        )  # fmt: skip
    sums, total, most = _over_keys(
        sums, total, most, query, k, v, bias, m, near, behind, length, token_stride, far, scale,
        size, width, block_n, kind, True, is_causal,
    )  # fmt: skip
    if kind == 2 and not is_causal:
        sums, total, most = _over_keys(
            sums, total, most, query, k, v, bias, m, behind, end, length, token_stride, far, scale,
            size, width, block_n, kind, False, is_causal,
        )  # fmt: skip
    target = out + (begin + m.to(tl.int64))[:, None] * out_stride + head * size + dims[None, :]
    tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), is_in)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    begins: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    bias: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Attend within rows that are parts of one axis of tokens.

    Args:
        q: [H, T, D]; the last axis without gaps.
        k: likewise.
        v: likewise.
        begins: int [B], first token of each row.
        lengths: int [B].
        longest: at least the largest of them.
        scale: of q k.
        bias: ALiBi's slopes, fp32 [H]; or fp32 [H, 2 n + 1], of a key n or more tokens before its query to one n or
            more behind it; None: none.
        is_causal: whether a token sees those before it only.

    Returns:
        [H, T, D], of which [T, H * D] is a view; what belongs to no row is anything.
    """
    heads, tokens, size = q.shape
    if not q.stride() == k.stride() == v.stride():
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    width = max(16, triton.next_power_of_2(size))
    block_m, block_n, warps, stages = _TILES if width <= 128 and q.dtype != torch.float32 else _SMALL_TILES
    kind = NO_BIAS if bias is None else SLOPES if bias.dim() == 1 else 2
    _attend_rows[(triton.cdiv(longest, block_m), heads, len(lengths))](
        q, k, v, out, begins, lengths, q if bias is None else bias, q.stride(1), q.stride(0), out.stride(0),
        scale * _LOG2_E, (bias.shape[1] - 1) // 2 if bias is not None and kind == 2 else 0,
        size=size, width=width, block_m=block_m, block_n=block_n, kind=kind, is_causal=is_causal,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.transpose(0, 1)
