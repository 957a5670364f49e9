"""Prefill attention: packed rows attend to themselves, causally or in both directions, with a bias or without.

Flash attention (Dao 2023): a program computes some queries of a row and a head, and iterates over the row's keys. The
bias is not read from a mask as large as the scores: ALiBi's is computed, T5's is looked up by distance, and beyond the
table's largest distance, where most keys of a long row are, it is one number. Blocks of keys that all queries see, with
one bias, are free: nothing is masked or looked up there. The other blocks are edges.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .decode_attention import BY_DISTANCE, NO_BIAS, SLOPES
from .elements import LOG2_E
from .launch import uses_pdl
from .row_blocks import BLOCK_FIELDS, PackedRows

# Queries and keys of a program at a time, warps, stages, the most registers of a thread (0: no limit): the fastest of
# 48 on an H200, for 128 heads of a T5, and for causal rows of 32 heads; for wide heads, of those without spills.
Tiles = tuple[int, int, int, int, int]
_TILES, _CAUSAL_TILES, _WIDE_TILES = (128, 32, 8, 3, 128), (64, 64, 4, 3, 0), (128, 32, 8, 3, 0)
# Where the tensor cores take operands from registers (before Hopper), wide heads need more threads or fewer queries.
_OLDER_WIDE_TILES = (64, 32, 8, 2, 0)
_SMALL_TILES, _FP32_TILES = (64, 32, 4, 2, 0), (32, 32, 4, 2, 0)
_SHORT = 64  # tokens, for which fewer queries are enough
# Programs of all heads begin together if the L2 cache holds their keys and values, or if there are so few programs that
# the ones with the most keys must begin first.
_CACHED_BYTES, _FEW_PROGRAMS = 16 << 20, 4096


@triton.jit
def _loaded(places, n, length, size: tl.constexpr, width: tl.constexpr, is_edge: tl.constexpr):
    dims = tl.arange(0, width)
    if is_edge:
        return tl.load(places, (n < length)[:, None] & (dims < size)[None, :], 0.0)
    elif size < width:
        return tl.load(places, (dims < size)[None, :], 0.0)
    else:
        return tl.load(places)


@triton.jit
def _looked_up(table, index, is_native: tl.constexpr):
    """Return table[index]; written so that Triton does not allocate shared memory to prefetch it."""
    if is_native:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 place; mad.wide.s32 place, $2, 4, $1; ld.global.nc.f32 $0, [place]; }",
            "=f,l,r",
            [table.to(tl.int64), index],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.load(table + index)


@triton.jit
def _over_blocks(  # noqa: C901 (one kernel)
    sums, total, most, query, k, v, bias, m, start, block, count, gap, skipped, length, token_stride, far, scale,
    size: tl.constexpr, width: tl.constexpr, block_n: tl.constexpr, kind: tl.constexpr, is_edge: tl.constexpr,
    is_causal: tl.constexpr, is_native: tl.constexpr,
):  # fmt: skip
    """Attend to ``count`` blocks of keys from ``block`` on; at ``gap``, ``skipped`` blocks are left out."""
    places, dims = tl.arange(0, block_n), tl.arange(0, width)
    offsets = places[:, None] * token_stride + dims[None, :]
    slope, before, behind = 0.0, 0.0, 0.0
    if kind == 1:
        slope = tl.load(bias) * LOG2_E
    if kind == 2:
        before, behind = tl.load(bias) * LOG2_E, tl.load(bias + 2 * far) * LOG2_E
    for index in range(0, count):
        here = block + index
        first = tl.where(here < gap, here, here + skipped) * block_n
        n = first + places
        at = first.to(tl.int64) * token_stride
        keys = _loaded(k + at + offsets, n, length, size, width, is_edge)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        shift = 0.0  # of all scores; the scale, which has log2(e) in it, is positive
        if kind == 1:  # what a row's scores have in common cancels out: distances from the first query do
            scores = scores * scale + (slope * (n - start))[None, :]
        elif is_edge:
            scores *= scale
            if kind == 2:
                near = tl.minimum(tl.maximum(n[None, :] - m[:, None], -far), far) + far
                scores += _looked_up(bias, near, is_native) * LOG2_E
        elif kind == 2:
            shift = tl.where(here < gap, before, behind)
        if is_edge:
            is_seen = (n < length)[None, :]
            if is_causal:
                is_seen = is_seen & (n[None, :] <= m[:, None])
            scores = tl.where(is_seen, scores, -float("inf"))
        if is_edge or kind == 1:
            higher = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
        else:
            higher = tl.maximum(most, tl.max(scores, 1) * scale + shift)
            weights = tl.exp2(scores * scale - (higher - shift)[:, None])
        rescale = tl.exp2(most - higher)
        total = total * rescale + tl.sum(weights, 1)
        values = _loaded(v + at + offsets, n, length, size, width, is_edge)
        sums = tl.dot(weights.to(values.dtype), values, sums * rescale[:, None], input_precision="ieee")
        most = higher
    return sums, total, most


@triton.jit(do_not_specialize=("far",))
def _attend_rows(
    q, k, v, out, blocks, bias, token_stride, head_stride, out_stride, scale, far,
    size: tl.constexpr, width: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr, kind: tl.constexpr,
    is_causal: tl.constexpr, is_native: tl.constexpr,
):  # fmt: skip
    head, block = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), tl.program_id(1)
    blocks += block * BLOCK_FIELDS
    length = tl.load(blocks + 1)
    if length == 0:
        return
    begin, start = tl.load(blocks).to(tl.int64), tl.load(blocks + 2)
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
    # Blocks: edges are from near to behind, and from whole on; behind is after whole where nothing lies between.
    blocks, whole = tl.cdiv(end, block_n), end // block_n
    near, behind = 0, 0
    if kind == 2:
        near = tl.maximum(start - far + 1, 0) // block_n
        behind = tl.minimum(tl.cdiv(start + block_m + far - 1, block_n), blocks)
    elif is_causal:
        near, behind = start // block_n, blocks
    free = near + tl.maximum(whole - behind, 0)
    sums, total, most = _over_blocks(
        sums, total, most, query, k + origin, v + origin, bias, m, start, 0, free, near, behind - near,
        length, token_stride, far, scale, size, width, block_n, kind, False, is_causal, is_native,
    )  # fmt: skip
    sums, total, most = _over_blocks(
        sums, total, most, query, k + origin, v + origin, bias, m, start, near, blocks - free, behind,
        tl.maximum(whole - behind, 0),
        length, token_stride, far, scale, size, width, block_n, kind, True, is_causal, is_native,
    )  # fmt: skip
    target = out + (begin + m.to(tl.int64))[:, None] * out_stride + head * size + dims[None, :]
    tl.store(target, (sums / total[:, None]).to(out.dtype.element_ty), is_in)


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: PackedRows,
    scale: float,
    bias: Tensor | None = None,
    is_causal: bool = False,
    tiles: Tiles | None = None,
) -> Tensor:
    """Attend within rows that are parts of one axis of tokens.

    Args:
        q: [H, T, D]; the last axis without gaps.
        k: as q.
        v: as q.
        rows: of these tokens.
        scale: of q k.
        bias: ALiBi's slopes, fp32 [H]; or fp32 [H, 2 n + 1], of a key n or more tokens before its query to one n or
            more after it; None: none.
        is_causal: whether a token sees only earlier tokens and itself.
        tiles: None: by shape.

    Returns:
        [H, T, D], of which [T, H * D] is a view; what belongs to no row is anything.
    """
    heads, tokens, size = q.shape
    if not q.stride() == k.stride() == v.stride():
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    width = max(16, triton.next_power_of_2(size))
    block_m, block_n, warps, stages, registers = tiles or _choose(rows.longest, width, q.dtype, is_causal, q.device)
    limit = {"maxnreg": registers} if registers else {}
    kind = NO_BIAS if bias is None else SLOPES if bias.dim() == 1 else BY_DISTANCE
    blocks, _ = rows.cut(block_m)
    is_cached = 2 * rows.longest * heads * size * q.element_size() <= _CACHED_BYTES
    together = heads if is_cached or (is_causal and heads * len(blocks) <= _FEW_PROGRAMS) else 1
    _attend_rows[(together, len(blocks), heads // together)](
        q, k, v, out, blocks, q if bias is None else bias, q.stride(1), q.stride(0), out.stride(0),
        scale * LOG2_E.value, (bias.shape[1] - 1) // 2 if bias is not None and kind == BY_DISTANCE else 0,
        size=size, width=width, block_m=block_m, block_n=block_n, kind=kind, is_causal=is_causal,
        is_native=q.is_cuda, num_warps=warps, num_stages=stages, **limit,
    )  # fmt: skip
    return out.transpose(0, 1)


def _choose(longest: int, width: int, dtype: torch.dtype, is_causal: bool, device: torch.device) -> Tiles:
    if dtype == torch.float32:
        return _FP32_TILES
    wide = _WIDE_TILES if uses_pdl(device) else _OLDER_WIDE_TILES
    tiles = wide if width > 128 else _CAUSAL_TILES if is_causal or longest <= _SHORT else _TILES
    queries, keys, _, stages, _ = tiles
    needed = dtype.itemsize * width * (queries + 2 * stages * keys)
    return tiles if needed <= shared_bytes(device) else _SMALL_TILES


@lru_cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have at most."""
    if device.type != "cuda":
        return 1 << 20  # the interpreter has no limit
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])
