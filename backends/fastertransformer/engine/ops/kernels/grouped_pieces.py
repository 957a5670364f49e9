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
        every: the pieces, one behind another.
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
