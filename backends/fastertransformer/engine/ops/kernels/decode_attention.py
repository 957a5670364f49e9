"""Decode attention over pages: one query of each row against the cells that the row uses.

B: rows; H: heads; D: size of a head. A row's cells are split into enough pieces to fill the GPU, one for each program;
the last program of a row and head to finish merges the pieces (flash-decoding, Dao et al. 2023). The lengths are read
on the device, so one CUDA graph serves rows of any length, and each row costs what it needs. The same launch writes the
new token's key and value.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..positions import Rotary
from .elements import LOG2_E, rotary_factors
from .fp8_cells import exponents_of, fp8_kind, keep_cell, numbers_of
from .launch import scratch_of, uses_pdl

_MOST_PIECES = 32
LEAST_SCORE = tl.constexpr(-1e30)  # a score that none is below; the difference of two infinities is no number
NO_BIAS, SLOPES, BY_DISTANCE = 0, 1, 2  # kinds


class Tiles(NamedTuple):
    """How rows' cells are split over programs.

    Attributes:
        held: bytes of keys, and of values, that a program holds at a time.
        warps: of a program.
        registers: the most of a thread; 0: no limit.
        least: cells of a piece at least; up to twice as many are one piece, for merging two takes longer.
        programs: for each processor at least, if there are enough cells.
    """

    held: int
    warps: int
    registers: int
    least: int
    programs: int


# If all rows have together as many heads as a quarter of the processors or fewer, as all processors, and more. On an
# H200 32 heads of 80 cells take 4.5 us with the first and 4.9 with the second, of 1000 cells 14.2 and 8.9; 48 heads of
# 300 cells 10.9 and 7.2. 256 rows of 20 to 500 cells and 32 heads take 271 us with the last, reading takes 243 of it.
_FEW, _SOME, _MANY = Tiles(32768, 8, 0, 128, 2), Tiles(8192, 4, 128, 64, 4), Tiles(8192, 4, 128, 128, 2)
_VARYING = ("row_stride", "head_stride", "table_stride", "pieces", "distances", "rotary_size")


@triton.jit
def pages_of(table, first, end, block: tl.constexpr, page_tokens: tl.constexpr):
    """Pages of the cells from first on: one page where a block lies within a page, else [block]."""
    if page_tokens % block == 0:
        pages = tl.load(table + first // page_tokens, first < end, 0, cache_modifier=".cg")
    else:
        cells = first + tl.arange(0, block)
        pages = tl.load(table + cells // page_tokens, cells < end, 0, cache_modifier=".cg")
    return pages


@triton.jit
def place_of(pages, first, block: tl.constexpr, page_tokens: tl.constexpr, size: tl.constexpr, page_stride):
    """Where the cells from first on are in a layer's cache, [block]; see pages_of."""
    return pages.to(tl.int64) * page_stride + ((first + tl.arange(0, block)) % page_tokens) * size


@triton.jit(do_not_specialize=_VARYING)
def _attend(  # noqa: C901 (one kernel)
    q, k, v, kv, tables, positions, windows, out, bias, partial, finished,
    row_stride, head_stride, table_stride, page_stride, values_at, scale, pieces, distances, rotary_size, frequencies,
    factor, page_tokens: tl.constexpr, size: tl.constexpr, width: tl.constexpr, block: tl.constexpr, kind: tl.constexpr,
    is_cut: tl.constexpr, is_new: tl.constexpr, least: tl.constexpr, rotation: tl.constexpr, uses_pdl: tl.constexpr,
    fp8: tl.constexpr,
):  # fmt: skip
    row, head, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1)
    if uses_pdl:
        gdc_launch_dependents()
    # Results of earlier steps are complete: they are loaded before the kernel before this one has ended; see
    # elementwise._embed. Not through the L1 cache, which may hold values of the step before.
    position = tl.load(positions + row, cache_modifier=".cg")
    window = tl.load(windows + row, cache_modifier=".cg")
    length = tl.minimum(position + 1, window).to(tl.int32)
    newest = tl.where(is_new, position % window, -1).to(tl.int32)  # cell of the token itself
    piece_cells = tl.maximum(tl.cdiv(tl.cdiv(length, pieces), block) * block, least)
    piece_cells = tl.where(length <= 2 * least, 2 * least, piece_cells)
    start = piece * piece_cells
    if start >= length:
        return
    end = tl.minimum(start + piece_cells, length)
    dims = tl.arange(0, width)
    is_dim = dims < size
    head_cells: tl.constexpr = page_tokens * (size + 1 if fp8 else size)
    kv += head * head_cells
    base = kv + dims[None, :]
    steps = tl.arange(0, block)
    own_table = tables + row * table_stride
    pages = pages_of(own_table, start, end, block, page_tokens)
    cells = start + steps
    is_seen = (cells < end) & (cells != newest)
    place = place_of(pages, start, block, page_tokens, size, page_stride)[:, None]
    key_exponents, value_exponents = steps, steps
    if fp8:
        exponents = kv + exponents_of(pages, start, block, page_tokens, size, page_stride)
        key_exponents = tl.load(exponents, is_seen, 0, cache_modifier=".cg")
        value_exponents = tl.load(exponents + values_at, is_seen, 0, cache_modifier=".cg")
    pages = pages_of(own_table, start + block, end, block, page_tokens)  # a block ahead: their cells depend on them
    is_read = is_seen[:, None] & is_dim[None, :]
    keys = tl.load(base + place, is_read, 0, cache_modifier=".cg")
    values = tl.load(base + values_at + place, is_read, 0, cache_modifier=".cg")
    if rotation != 0:
        other, cos, sin, is_rotated = rotary_factors(dims, position, rotary_size, frequencies, factor, rotation)
    if uses_pdl:
        gdc_wait()
    source = row.to(tl.int64) * row_stride + head * head_stride + dims
    query = tl.load(q + source, is_dim, 0.0).to(tl.float32)
    if rotation != 0:
        partner = row.to(tl.int64) * row_stride + head * head_stride + other
        query = query * cos + tl.load(q + partner, is_rotated, 0.0).to(tl.float32) * sin
    query *= scale  # has log2(e) in it
    own_score = LEAST_SCORE
    own_value = tl.zeros((width,), tl.float32)
    if (newest >= start) & (newest < end):
        key, value = tl.load(k + source, is_dim, 0.0), tl.load(v + source, is_dim, 0.0)
        if rotation != 0:
            rotated = key.to(tl.float32) * cos + tl.load(k + partner, is_rotated, 0.0).to(tl.float32) * sin
            key = rotated.to(key.dtype)
        page = tl.load(tables + row * table_stride + newest // page_tokens).to(tl.int64)
        cell = kv + page * page_stride + (newest % page_tokens) * size + dims
        if fp8:
            exponent = kv + page * page_stride + page_tokens * size + newest % page_tokens
            keep_cell(cell, exponent, key.to(tl.float32), is_dim)
            keep_cell(cell + values_at, exponent + values_at, value.to(tl.float32), is_dim)
        else:
            tl.store(cell, key, is_dim)
            tl.store(cell + values_at, value, is_dim)
        own_score = tl.sum(query * key.to(tl.float32), 0)
        if kind == 2:
            own_score += tl.load(bias + head * distances) * LOG2_E
        own_value = value.to(tl.float32)
    # Every place in a block has its own highest score and sums: they are merged once at the end, not for every block.
    most = tl.full((block,), LEAST_SCORE, tl.float32)
    total = tl.zeros((block,), tl.float32)
    sums = tl.zeros((block, width), tl.float32)
    for first in range(start + block, end + block, block):
        scores = tl.sum(query[None, :] * numbers_of(keys, key_exponents, tl.float32, fp8).to(tl.float32), 1)
        if kind != 0:
            distance = ((position - cells) % window).to(tl.int32)
            if kind == 1:
                scores -= tl.load(bias + head) * distance * LOG2_E
            else:
                nearest = tl.minimum(distance, distances - 1)
                scores += tl.load(bias + head * distances + nearest, is_seen, 0.0) * LOG2_E
        scores = tl.where(is_seen, scores, -float("inf"))
        cells = first + steps
        is_seen = (cells < end) & (cells != newest)
        place = place_of(pages, first, block, page_tokens, size, page_stride)[:, None]
        if fp8:
            exponents = kv + exponents_of(pages, first, block, page_tokens, size, page_stride)
            key_exponents = tl.load(exponents, is_seen, 0)
        pages = pages_of(own_table, first + block, end, block, page_tokens)
        is_read = is_seen[:, None] & is_dim[None, :]
        keys = tl.load(base + place, is_read, 0)
        higher = tl.maximum(most, scores)
        weights = tl.exp2(scores - higher)
        rescale = tl.exp2(most - higher)
        total = total * rescale + weights
        weighed = numbers_of(values, value_exponents, tl.float32, fp8).to(tl.float32)
        sums = sums * rescale[:, None] + weights[:, None] * weighed
        values = tl.load(base + values_at + place, is_read, 0)
        if fp8:
            value_exponents = tl.load(exponents + values_at, is_seen, 0)
        most = higher
    highest = tl.maximum(tl.max(most, 0), own_score)
    gain = tl.exp2(most - highest)
    own_gain = tl.where((newest >= start) & (newest < end), tl.exp2(own_score - highest), 0.0)
    total = tl.sum(total * gain, 0) + own_gain
    sums = tl.sum(sums * gain[:, None], 0) + own_gain * own_value
    most = highest
    target = out + (row * heads + head).to(tl.int64) * size + dims
    if not is_cut:
        tl.store(target, (sums / total).to(out.dtype.element_ty), is_dim)
        return
    count = tl.cdiv(length, piece_cells)
    if count == 1:
        tl.store(target, (sums / total).to(out.dtype.element_ty), is_dim)
        return
    # [B, H, pieces, width + 2]: sums, then the highest score and the total.
    own_part = partial + (row * heads + head).to(tl.int64) * pieces * (width + 2)
    tl.store(own_part + piece * (width + 2) + dims, sums)
    tl.store(own_part + piece * (width + 2) + width, most)
    tl.store(own_part + piece * (width + 2) + width + 1, total)
    tl.debug_barrier()
    before = tl.atomic_add(finished + row * heads + head, 1, sem="acq_rel", scope="gpu")
    if before != count - 1:
        return
    most = -float("inf")
    total = 0.0
    sums = tl.zeros((width,), tl.float32)
    for other in range(0, count):
        other_part = own_part + other * (width + 2)
        other_most = tl.load(other_part + width, cache_modifier=".cg")
        higher = tl.maximum(most, other_most)
        own_rescale, other_gain = tl.exp2(most - higher), tl.exp2(other_most - higher)
        total = total * own_rescale + tl.load(other_part + width + 1, cache_modifier=".cg") * other_gain
        sums = sums * own_rescale + tl.load(other_part + dims, cache_modifier=".cg") * other_gain
        most = higher
    tl.store(finished + row * heads + head, 0)
    tl.store(target, (sums / total).to(out.dtype.element_ty), is_dim)


def attend(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv: Tensor,
    tables: Tensor,
    positions: Tensor,
    windows: Tensor,
    scale: float,
    bias: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    """Attend from the newest token of each row to its earlier tokens, and write its key and value.

    Args:
        q: [B, H, 1, D]; the last axis without gaps.
        k: of the same token, like q; None: nothing is written, for the row's last cell is in the cache already.
        v: as k.
        kv: a layer's cache, [2, pages, H, PAGE, D].
        tables: int32 [B, width], pages of each row.
        positions: int64 [B].
        windows: int64 [B]; see kv_cache.py.
        scale: of q k.
        bias: by distance, see positions.Alibi and Relative; None: none.
        rotary: rotary positions that are applied to queries and keys; None: none.

    Returns:
        [B, H, 1, D], of which [B, 1, H * D] is a view.
    """
    batch, heads, _, size = q.shape
    if k is not None and v is not None and not q.stride() == k.stride() == v.stride():
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    scratch, has_pdl = scratch_of(q.device), uses_pdl(q.device)
    programs, processors = batch * heads, scratch.processors
    tiles = _FEW if programs <= processors // 4 else _SOME if programs <= processors else _MANY
    pieces = min(_MOST_PIECES, -(-tiles.programs * processors // programs))
    width = triton.next_power_of_2(size)
    partial, finished = scratch.get(programs, programs * pieces * (width + 2) if pieces > 1 else 0)
    kind = NO_BIAS if bias is None else SLOPES if bias.dim() == 1 else BY_DISTANCE
    held = tiles.held if has_pdl or kind == NO_BIAS else tiles.held // 2  # else registers are spilled on older GPUs
    fp8 = fp8_kind(kv)
    block = max(16, min(64 if fp8 else 128, held // (width * q.dtype.itemsize)))
    out = torch.empty((batch, 1, heads, size), dtype=q.dtype, device=q.device)
    # A bias takes some more, and so do FP8 and older GPUs.
    is_limited = tiles.registers and has_pdl and kind == NO_BIAS and not fp8
    limit = {"maxnreg": tiles.registers} if is_limited else {}
    _attend[(batch, heads, pieces)](
        q, q if k is None else k, q if v is None else v, kv, tables, positions, windows, out,
        q if bias is None else bias, partial, finished,
        q.stride(0), q.stride(1), tables.stride(0), kv.stride(1), kv.stride(0), scale * LOG2_E.value, pieces,
        bias.shape[1] if bias is not None and bias.dim() == 2 else 0,
        rotary.width if rotary else 0, rotary.inverse_frequencies if rotary else None, rotary.factor if rotary else 1.0,
        page_tokens=kv.shape[3], size=size, width=width, block=block, kind=kind,
        is_cut=pieces > 1, is_new=k is not None, least=tiles.least,
        rotation=0 if rotary is None else 1 if rotary.is_by_pairs else 2,
        uses_pdl=has_pdl, fp8=fp8, num_warps=tiles.warps, launch_pdl=has_pdl, **limit,
    )  # fmt: skip
    return out.transpose(1, 2)
