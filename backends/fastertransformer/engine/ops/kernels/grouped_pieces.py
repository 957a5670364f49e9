"""Merge what programs have computed of pieces of a row's cells, for all query heads of a KV head.

Programs run this code once, so that reading its instructions takes longer than what they do: it is a short loop.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_attention import LEAST_SCORE

MOST_PIECES = 64  # of a row
_AT_ONCE = tl.constexpr(4)  # pieces that are merged at a time


@triton.jit
def merge_pieces(every, parts, group: tl.constexpr, many: tl.constexpr, width: tl.constexpr):
    """Merge the pieces of a row and KV head -> sums, [many, width], and totals, [many].

    A piece has sums, [group, width], the highest scores, [group], totals, [group], and as much that is not used.

    Args:
        every: the pieces, one after another.
        parts: how many there are.
        group: query heads of the KV head.
        many: the next power of two.
        width: of a head, a power of two.
    """
    g, dims = tl.arange(0, many), tl.arange(0, width)
    stride: tl.constexpr = group * (width + 4)
    highest = tl.full((many,), LEAST_SCORE, tl.float32)
    totals = tl.zeros((many,), tl.float32)
    sums = tl.zeros((many, width), tl.float32)
    for first in range(0, parts, _AT_ONCE):
        some = first + tl.arange(0, _AT_ONCE)
        is_some = (some < parts)[:, None] & (g < group)[None, :]
        at = every + some[:, None] * stride + g[None, :]
        highs = tl.load(at + group * width, is_some, LEAST_SCORE, cache_modifier=".cg")
        own = tl.load(at + group * (width + 1), is_some, 0.0, cache_modifier=".cg")
        places = (every + some[:, None] * stride + g[None, :] * width)[:, :, None] + dims[None, None, :]
        found = tl.load(places, is_some[:, :, None], 0.0, cache_modifier=".cg")
        higher = tl.maximum(highest, tl.max(highs, 0))
        gains = tl.exp2(highs - higher[None, :])
        rescale = tl.exp2(highest - higher)
        totals = totals * rescale + tl.sum(own * gains, 0)
        sums = sums * rescale[:, None] + tl.sum(found * gains[:, :, None], 0)
        highest = higher
    return sums, totals


@triton.jit
def merge_tiles(every, parts, heads, column, rows: tl.constexpr, width: tl.constexpr, columns: tl.constexpr):
    """Merge some columns of the pieces of a tile -> sums, [rows, columns], and totals, [rows].

    A piece has sums, [rows, width], the highest scores, [rows], and totals, [rows].

    Args:
        every: the first piece; each of the others is ``heads`` pieces after the one before it.
        parts: how many there are.
        heads: whose pieces lie between.
        column: the first.
        rows: of the tile, a power of two.
        width: of a head, a power of two.
        columns: as many as registers hold twice, a power of two.
    """
    m, dims = tl.arange(0, rows), column + tl.arange(0, columns)
    highest = tl.full((rows,), LEAST_SCORE, tl.float32)
    totals = tl.zeros((rows,), tl.float32)
    sums = tl.zeros((rows, columns), tl.float32)
    for _ in tl.range(0, parts, num_stages=1):
        own = tl.load(every + rows * width + m, cache_modifier=".cg")
        higher = tl.maximum(highest, own)
        rescale, gain = tl.exp2(highest - higher), tl.exp2(own - higher)
        total = tl.load(every + rows * (width + 1) + m, cache_modifier=".cg")
        found = tl.load(every + m[:, None] * width + dims[None, :], cache_modifier=".cg")
        totals = totals * rescale + total * gain
        sums = sums * rescale[:, None] + found * gain[:, None]
        highest = higher
        every += heads * rows * (width + 2)
    return sums, totals
