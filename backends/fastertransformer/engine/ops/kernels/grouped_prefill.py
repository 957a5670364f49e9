"""Causal attention of packed rows whose query heads share KV heads: to themselves, or to all that their pages hold.

Flash attention, as prefill_attention; but a program computes all query heads of a KV head for some tokens, scores may
be capped, and blocks of keys before a window are skipped. New rows read their keys and values where the product wrote
them. Rows that continue what is cached (prefix cache, sessions, chunks of a prompt) read them from their pages, which
have their own tokens already; see extend. Of such rows, those of one token are left to grouped_decode. If the others
have few tokens and many cells, several programs share a block of tokens, and the last of them merges; see row_blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..positions import AttentionSpec
from .elements import LOG2_E, capped, reach_of
from .fp8_cells import fp8_kind, numbers_of
from .grouped_decode import attend_groups
from .grouped_pieces import merge_tiles
from .launch import scores_of, scratch_of, uses_pdl
from .prefill_attention import Tiles, shared_bytes
from .row_blocks import BLOCK_FIELDS, PackedRows, Reads, Split

# Queries and keys of a program at a time, warps, stages, the most registers of a thread (0: no limit).
_TILES, _WIDE_TILES = (64, 64, 4, 3, 0), (128, 32, 8, 3, 0)
_OLDER_TILES, _OLDER_WIDE_TILES = (64, 32, 4, 3, 0), (64, 32, 8, 2, 0)  # before Hopper, see prefill_attention
_SMALL_TILES, _FP32_TILES = (64, 32, 4, 2, 0), (32, 32, 4, 2, 0)
_CACHED_BYTES, _FEW_PROGRAMS = 16 << 20, 4096  # see prefill_attention
_MOST_COLUMNS = tl.constexpr(64)  # that are merged at a time
_WARPS = 8  # that a processor runs of this kernel at the same time: registers and shared memory allow no more


@triton.jit
def _numbers(tile, kept, exponents, cells, least, end, dtype: tl.constexpr, is_edge: tl.constexpr, fp8: tl.constexpr):
    """Return a block of keys or values as numbers of a type."""
    if fp8:
        if is_edge:
            scales = tl.load(kept + exponents, (cells >= least) & (cells < end), 0)
        else:
            scales = tl.load(kept + exponents)
        tile = numbers_of(tile, scales, dtype, fp8)
    return tile


@triton.jit
def _over_cells(  # noqa: C901 (one kernel)
    sums, total, most, query, position, k, v, table, block, count, gap, skipped, least, end, kv_stride, page_stride,
    scale, cap, reach, page_tokens: tl.constexpr, size: tl.constexpr, width: tl.constexpr, block_n: tl.constexpr,
    has_cap: tl.constexpr, in_chunks: tl.constexpr, is_paged: tl.constexpr, is_edge: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    """Attend to ``count`` blocks of cells from ``block`` on; at ``gap``, ``skipped`` blocks are left out.

    Cells before ``least`` are not read: their pages may be gone, see PageAllocator.unneeded.
    """
    steps, dims = tl.arange(0, block_n), tl.arange(0, width)
    first = tl.where(block < gap, block, block + skipped) * block_n
    pages = steps
    if is_paged:
        pages = tl.load(table + (first + steps) // page_tokens, first + steps < end, 0)
    for index in range(0, count):
        cells = first + steps
        exponents = cells
        if is_paged:
            at = pages.to(tl.int64) * page_stride + (cells % page_tokens) * size
            if fp8:
                exponents = pages.to(tl.int64) * page_stride + page_tokens * size + cells % page_tokens
        else:
            at = cells.to(tl.int64) * kv_stride
        here = block + index + 1
        first = tl.where(here < gap, here, here + skipped) * block_n
        if is_paged:  # a block ahead: the cells' places depend on them
            pages = tl.load(table + (first + steps) // page_tokens, first + steps < end, 0)
        at = at[:, None] + dims[None, :]
        is_in = ((cells >= least) & (cells < end))[:, None] & (dims < size)[None, :]
        if is_edge:
            keys = tl.load(k + at, is_in, 0)
        elif size < width:
            keys = tl.load(k + at, (dims < size)[None, :], 0)
        else:
            keys = tl.load(k + at)
        keys = _numbers(keys, k, exponents, cells, least, end, query.dtype, is_edge, fp8)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        if has_cap:
            scores = capped(scores * scale, cap)
        if is_edge:
            distance = position[:, None] - cells[None, :]
            is_seen = (distance >= 0) & (distance < reach_of(position[:, None], reach, in_chunks))
            scores = tl.where(is_seen, scores, -float("inf"))
        if has_cap:
            higher = tl.maximum(most, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
        else:
            higher = tl.maximum(most, tl.max(scores, 1) * scale)
            weights = tl.exp2(scores * scale - higher[:, None])
        rescale = tl.exp2(most - higher)
        total = total * rescale + tl.sum(weights, 1)
        if is_edge:
            values = tl.load(v + at, is_in, 0)
        elif size < width:
            values = tl.load(v + at, (dims < size)[None, :], 0)
        else:
            values = tl.load(v + at)
        values = _numbers(values, v, exponents, cells, least, end, query.dtype, is_edge, fp8)
        sums = tl.dot(weights.to(values.dtype), values, sums * rescale[:, None], input_precision="ieee")
        most = higher
    return sums, total, most


@triton.jit(do_not_specialize=("table_stride", "reach", "positions", "slots"))
def _attend_causally(
    q, k, v, out, blocks, tables, slots, positions, sinks, partial, finished,
    q_stride, q_head_stride, kv_stride, kv_head_stride, table_stride, page_stride, scale, cap, reach,
    group: tl.constexpr, page_tokens: tl.constexpr, size: tl.constexpr, width: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, has_cap: tl.constexpr, in_chunks: tl.constexpr, is_paged: tl.constexpr,
    has_sinks: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    """Compute the query heads of a KV head for block_m / group tokens of a row, or what a piece of the cells adds."""
    head, item = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0), tl.program_id(1)
    heads = tl.num_programs(0) * tl.num_programs(2)
    blocks += item * BLOCK_FIELDS
    length = tl.load(blocks + 1)
    if length == 0:
        return
    begin, start = tl.load(blocks).to(tl.int64), tl.load(blocks + 2)
    before = 0  # cells of the row before these tokens
    if is_paged:
        before = tl.load(positions + begin).to(tl.int32)
        tables += tl.load(slots + begin) * table_stride
        head_cells: tl.constexpr = page_tokens * (size + 1 if fp8 else size)
        k += head * head_cells
        v += head * head_cells
    else:
        k += begin * kv_stride + head * kv_head_stride
        v += begin * kv_stride + head * kv_head_stride
    tokens: tl.constexpr = block_m // group
    m, dims = tl.arange(0, block_m), tl.arange(0, width)
    token = start + m // group
    query_head = head * group + m % group
    is_in = ((m < tokens * group) & (token < length))[:, None] & (dims < size)[None, :]
    source = (begin + token) * q_stride + query_head * q_head_stride
    query = tl.load(q + source[:, None] + dims[None, :], is_in, 0.0)
    position = before + token
    first, end = before + start, before + tl.minimum(start + tokens, length)
    # Blocks that all of the tokens see are free, from ``inner`` on; those before and after them are edges.
    least = tl.maximum(first - reach_of(first, reach, in_chunks) + 1, 0)
    lowest = least // block_n
    inner = tl.cdiv(tl.maximum(end - reach_of(end - 1, reach, in_chunks), 0), block_n)
    free = tl.maximum((first + 1) // block_n - inner, 0)
    edges = tl.cdiv(end, block_n) - lowest - free
    if is_paged:
        piece, parts = tl.load(blocks + 3), tl.load(blocks + 4)
        count, free_end = free + edges, inner + free
        stop = lowest + count * (piece + 1) // parts
        lowest += count * piece // parts
        inner = tl.maximum(inner, lowest)
        free = tl.maximum(tl.minimum(free_end, stop) - inner, 0)
        edges = stop - lowest - free
    sums = tl.zeros([block_m, width], tl.float32)
    total = tl.zeros([block_m], tl.float32)
    most = tl.full([block_m], -1e30, tl.float32)
    if has_sinks:  # as a cell without a value, which the first piece has
        is_first = piece == 0 if is_paged else True
        sink = tl.load(sinks + query_head, m < tokens * group, 0.0) * LOG2_E
        most, total = tl.where(is_first, sink, most), tl.where(is_first, 1.0, total)
    sums, total, most = _over_cells(
        sums, total, most, query, position, k, v, tables, inner, free, inner + free, 0, least, end, kv_stride,
        page_stride, scale, cap, reach, page_tokens, size, width, block_n, has_cap, in_chunks, is_paged,
        False, fp8,
    )  # fmt: skip
    sums, total, most = _over_cells(
        sums, total, most, query, position, k, v, tables, lowest, edges, inner, free, least, end, kv_stride,
        page_stride, scale, cap, reach, page_tokens, size, width, block_n, has_cap, in_chunks, is_paged,
        True, fp8,
    )  # fmt: skip
    targets = out + (((begin + token) * heads * group + query_head) * size)[:, None]
    if is_paged:  # loaded once more: the loops need all registers
        piece, parts = tl.load(blocks + 3, volatile=True), tl.load(blocks + 4, volatile=True)
        if parts == 1:
            tl.store(targets + dims[None, :], (sums / total[:, None]).to(out.dtype.element_ty), is_in)
            return
        place = tl.load(blocks + 5)
        every = partial + ((place - piece) * heads + head).to(tl.int64) * block_m * (width + 2)
        own = every + piece.to(tl.int64) * heads * block_m * (width + 2)
        tl.store(own + m[:, None] * width + dims[None, :], sums)
        tl.store(own + block_m * width + m, most)
        tl.store(own + block_m * (width + 1) + m, total)
        tl.debug_barrier()
        counter = finished + (place - piece) * heads + head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") != parts - 1:
            return
        tl.store(counter, 0)
        columns: tl.constexpr = width if width < _MOST_COLUMNS else _MOST_COLUMNS
        for column in range(0, width, columns):
            merged, totals = merge_tiles(every, parts, heads, column, block_m, width, columns)
            d = column + tl.arange(0, columns)
            is_own = ((m < tokens * group) & (token < length))[:, None] & (d < size)[None, :]
            tl.store(targets + d[None, :], (merged / totals[:, None]).to(out.dtype.element_ty), is_own)
    else:
        tl.store(targets + dims[None, :], (sums / total[:, None]).to(out.dtype.element_ty), is_in)


def attend_group_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: PackedRows,
    spec: AttentionSpec,
    tiles: Tiles | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally within rows that are parts of one axis of tokens.

    Args:
        q: [H, T, D]; the last axis without gaps.
        k: [Hkv, T, D], likewise.
        v: as k.
        rows: of these tokens.
        spec: scale, cap, and window or chunk; not a bias.
        tiles: None: by shape.
        sinks: fp32 [H], see positions.Attend; None: none.

    Returns:
        [H, T, D], of which [T, H * D] is a view; what belongs to no row is anything.
    """
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    heads, tokens, size = q.shape
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    _launch(q, k, v, out, rows, spec, sinks, len(k), None, tiles, k.stride(1), k.stride(0), 0, 1)
    return out.transpose(0, 1)


def extend(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    slots: Tensor,
    positions: Tensor,
    rows: PackedRows,
    spec: AttentionSpec,
    tiles: Tiles | None = None,
    split: Split | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally from tokens of rows to all that the rows' pages hold, these tokens among it.

    Args:
        q: [H, T, D], rotated; the last axis without gaps.
        kv: a layer's cache, [2, pages, Hkv, PAGE, D].
        tables: int32 [slots, width], pages of each slot.
        slots: int64 [T].
        positions: int64 [T]; those of a row follow each other.
        rows: of these tokens, cut without those of one token; see PackedRows.
        spec: scale, cap, and window or chunk; not a bias.
        tiles: None: by shape.
        split: how programs share the cells of a block; None: as is fastest.
        sinks: as of attend_group_rows.

    Returns:
        [H, T, D], of which [T, H * D] is a view; what belongs to no row is anything.
    """
    heads, tokens, size = q.shape
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    attend_groups(q[None], None, None, kv, tables, rows.plan(positions, slots), spec, sinks=sinks, packed=out)
    paged, stride = (tables, slots, positions, split or Split()), kv.stride(1)
    _launch(q, kv[0], kv[1], out, rows, spec, sinks, kv.shape[2], paged, tiles, 0, 0, stride, kv.shape[3])
    return out.transpose(0, 1)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    rows: PackedRows,
    spec: AttentionSpec,
    sinks: Tensor | None,
    kv_heads: int,
    paged: tuple[Tensor, Tensor, Tensor, Split] | None,
    tiles: Tiles | None,
    kv_stride: int,
    kv_head_stride: int,
    page_stride: int,
    page_tokens: int,
) -> None:
    """Launch the kernel; see the functions above."""
    assert spec.bias is None, "a bias with groups of heads has no kernel"
    heads, _, size = q.shape
    width, group = max(16, triton.next_power_of_2(size)), heads // kv_heads
    block_m, block_n, warps, stages, registers = tiles or _choose(width, q.dtype, q.device)
    limit = {"maxnreg": registers} if registers else {}
    block_m = max(block_m, triton.next_power_of_2(group))
    tables, slots, positions, split = paged or (None, None, None, None)
    scores, scratch, reads = scores_of(spec), scratch_of(q.device), None
    if positions is not None and split is not None:
        reads = Reads(positions, scores.reach, kv_heads, _WARPS // warps * scratch.processors, split)
    blocks, shared = rows.cut(block_m // group, reads)
    partial, finished = scratch.get(shared * kv_heads, shared * kv_heads * block_m * (width + 2))
    is_cached = 2 * rows.longest * kv_heads * size * q.element_size() <= _CACHED_BYTES
    together = kv_heads if is_cached or kv_heads * len(blocks) <= _FEW_PROGRAMS else 1
    _attend_causally[(together, len(blocks), kv_heads // together)](
        q, k, v, out, blocks, tables, slots, positions, sinks, partial, finished, q.stride(1), q.stride(0), kv_stride,
        kv_head_stride, tables.stride(0) if tables is not None else 0, page_stride, scores.scale, scores.cap,
        scores.reach,
        group=group, page_tokens=page_tokens, size=size, width=width, block_m=block_m, block_n=block_n,
        has_cap=spec.softcap != 0, in_chunks=scores.in_chunks, is_paged=paged is not None,
        has_sinks=sinks is not None, fp8=fp8_kind(k) if paged else 0, num_warps=warps, num_stages=stages, **limit,
    )  # fmt: skip


def _choose(width: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    if dtype == torch.float32:
        return _FP32_TILES
    narrow, wide = (_TILES, _WIDE_TILES) if uses_pdl(device) else (_OLDER_TILES, _OLDER_WIDE_TILES)
    tiles = wide if width > 128 else narrow
    queries, keys, _, stages, _ = tiles
    needed = dtype.itemsize * width * (queries + 2 * stages * keys)
    return tiles if needed <= shared_bytes(device) else _SMALL_TILES
