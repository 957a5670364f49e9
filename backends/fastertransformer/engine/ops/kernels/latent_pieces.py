"""What the two kernels of latent attention share: queries meet a block of entries, and pieces of a row are merged."""

from __future__ import annotations

import triton
import triton.language as tl

from .grouped_pieces import merge_tiles

_MOST_COLUMNS = tl.constexpr(64)  # that are merged at a time


@triton.jit
def load_queries(turned, absorbed, token, head, is_in, head_stride, heads, rotated, padded, size, width):
    """Load the queries of some heads and tokens: what is rotated, [rows, padded], and absorbed, [rows, width]."""
    d, dims = tl.arange(0, padded), tl.arange(0, width)
    first = tl.load(
        turned + ((token * heads + head) * rotated)[:, None] + d[None, :], is_in[:, None] & (d < rotated)[None, :], 0.0
    )
    second = tl.load(
        absorbed + (head * head_stride + token * size)[:, None] + dims[None, :],
        is_in[:, None] & (dims < size)[None, :],
        0.0,
    )
    return first, second


@triton.jit
def over_entries(
    sums, total, most, turned, absorbed, position, kv, table, start, end, page_stride, scale,
    page_tokens: tl.constexpr, rotated: tl.constexpr, padded: tl.constexpr, size: tl.constexpr, width: tl.constexpr,
    block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Attend from queries at positions, [rows], to the entries from ``start`` to before ``end``, both of a row."""
    steps, d, dims = tl.arange(0, block), tl.arange(0, padded), tl.arange(0, width)
    for first in tl.range(start, end, block, num_stages=stages):
        cells = first + steps
        is_in = cells < end
        pages = tl.load(table + cells // page_tokens, is_in, 0).to(tl.int64)
        at = kv + (pages * page_stride + (cells % page_tokens) * (rotated + size))[:, None]
        latent = tl.load(at + rotated + dims[None, :], is_in[:, None] & (dims < size)[None, :], 0.0)
        keys = tl.load(at + d[None, :], is_in[:, None] & (d < rotated)[None, :], 0.0)
        scores = tl.dot(absorbed, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(turned, tl.trans(keys), scores, input_precision="ieee") * scale
        scores = tl.where(is_in[None, :] & (cells[None, :] <= position[:, None]), scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        rescale = tl.exp2(most - higher)
        total = total * rescale + tl.sum(weights, 1)
        sums = tl.dot(weights.to(latent.dtype), latent, sums * rescale[:, None], input_precision="ieee")
        most = higher
    return sums, total, most


@triton.jit
def store_piece(own, sums, total, most, rows: tl.constexpr, width: tl.constexpr):
    """Write what a piece of a row's entries adds; see merge_tiles."""
    m, dims = tl.arange(0, rows), tl.arange(0, width)
    tl.store(own + m[:, None] * width + dims[None, :], sums)
    tl.store(own + rows * width + m, most)
    tl.store(own + rows * (width + 1) + m, total)


@triton.jit
def store_merged(targets, is_in, every, parts, apart, rows: tl.constexpr, size: tl.constexpr, width: tl.constexpr):
    """Merge pieces that lie ``apart`` pieces from one another, and write what rows have attended."""
    columns: tl.constexpr = width if width < _MOST_COLUMNS else _MOST_COLUMNS
    for column in range(0, width, columns):
        merged, totals = merge_tiles(every, parts, apart, column, rows, width, columns)
        dims = column + tl.arange(0, columns)
        attended = (merged / totals[:, None]).to(targets.dtype.element_ty)
        tl.store(targets[:, None] + dims[None, :], attended, is_in[:, None] & (dims < size)[None, :])
