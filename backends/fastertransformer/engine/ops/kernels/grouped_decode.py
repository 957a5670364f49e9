"""Decode attention on the tensor cores: a program has all query heads of a KV head, so that its cells are read once.

B: rows; H: query heads; Hkv: KV heads; group: H / Hkv; D: size of a head. As in decode_attention, cells are split into
pieces, the last program of a row and KV head merges them, and the launch writes the new token's key and value. It also
caps scores, skips the cells before a window, and norms queries and keys. Of packed rows it serves those of one token,
whose key and value are in the cache already; grouped_prefill serves the others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..linear import HeadNorms
from ..positions import AttentionSpec
from .decode_attention import LEAST_SCORE, pages_of, place_of
from .elements import LOG2_E, capped, reach_of, rotary_factors
from .fp8_cells import exponents_of, fp8_kind, keep_cell, numbers_of
from .grouped_pieces import MOST_PIECES, merge_pieces
from .launch import scores_of, scratch_of, uses_pdl
from .row_plan import FIELDS

_HELD = 16384  # bytes of keys, and of values, that a program holds at a time
_VARYING = ("table_stride", "pieces", "rotary_size", "reach", "least", "shares")


class GroupTiles(NamedTuple):
    """How rows' cells are split over programs.

    Attributes:
        least: cells of a piece at least; up to twice as many are one piece.
        programs: for each processor at most, so that a row much longer than the others is split.
        block: the most cells that a program holds at a time.
        warps: of a program; heads wider than 128 take more.
        stages: of the pipeline that copies cells to shared memory; 0: to registers, a block ahead.
        shares: pieces for each processor that a step's cells make at most: where it has many, pieces are longer.
    """

    least: int
    programs: int
    block: int = 64
    warps: int = 4
    stages: int = 0
    shares: int = 6


# If all rows have together as many KV heads as a quarter of the processors or fewer, as twice the processors, and more.
# With few of them latency counts: the first cells are loaded before the kernel before this one has ended. With many,
# small blocks let three programs share a processor. On an H200, with 8 groups of 4 heads: 1 row of 200 cells takes 5.9,
# 6.9 and 8.7 us with these, 8 of 500 16.8, 11.5 and 15.8, 64 of 1000 136, 90 and 71. Split pieces are what rows of very
# different lengths need: 24 rows of a chat's, 244 cells in the mean and 1038 at most, take 19 us, and 35 in one piece.
_FEW, _SOME, _MANY = GroupTiles(64, 2, 64, 8), GroupTiles(128, 7, 64, shares=2), GroupTiles(256, 16, 32, 4, 5)


@triton.jit
def _seen(cells, last, ring, end, newest, reach):
    """Return which of a piece's cells a token sees; its own, the newest, is not read."""
    age = last - cells
    age = tl.where(age < 0, age + ring, age)
    return (cells < end) & (cells != newest) & (age < reach)


@triton.jit
def _weigh(query, keys, is_seen, most, total, scale, cap, has_cap: tl.constexpr):
    """Weigh a block of cells: weights, [padded, block]; how much smaller older sums become; totals; highest scores."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
    if has_cap:
        scores = capped(scores, cap)
    scores = tl.where(is_seen[None, :], scores, -float("inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    rescale = tl.exp2(most - higher)[:, None]
    return weights, rescale, total * rescale + weights, higher


@triton.jit(do_not_specialize=_VARYING)
def _attend_group(  # noqa: C901 (one kernel)
    q, k, v, kv, tables, plan, out, frequencies, q_gain, k_gain, sinks, partial, finished,
    q_stride, kv_stride, q_head_stride, kv_head_stride, table_stride, page_stride, values_at, scale, cap, reach, eps,
    pieces, least, shares, rotary_size, factor, group: tl.constexpr, many: tl.constexpr, padded: tl.constexpr,
    size: tl.constexpr, page_tokens: tl.constexpr, width: tl.constexpr, block: tl.constexpr, stages: tl.constexpr,
    has_cap: tl.constexpr, in_chunks: tl.constexpr, is_packed: tl.constexpr, has_norm: tl.constexpr,
    has_sinks: tl.constexpr, rotation: tl.constexpr, uses_pdl: tl.constexpr, fp8: tl.constexpr,
):  # fmt: skip
    head, piece, place = tl.program_id(0), tl.program_id(1), plan + tl.program_id(2)
    heads, rows = tl.num_programs(0), tl.num_programs(2)
    if uses_pdl:
        gdc_launch_dependents()
    # Results of earlier steps are complete; see decode_attention, and row_plan for the plan.
    row = tl.load(place, cache_modifier=".cg").to(tl.int32)
    token = tl.load(place + rows, cache_modifier=".cg")
    table_row = tl.load(place + 2 * rows, cache_modifier=".cg")
    absolute = tl.load(place + 3 * rows, cache_modifier=".cg")
    window = tl.load(place + 4 * rows, cache_modifier=".cg")
    share = tl.load(plan + 5 * rows, cache_modifier=".cg").to(tl.float32) * heads / shares
    least = tl.maximum(least, tl.cdiv(share.to(tl.int32), block) * block)
    position = absolute.to(tl.int32)
    ring = tl.minimum(window, 0x7FFFFFFF).to(tl.int32)
    last = (absolute % window).to(tl.int32)
    newest = -1 if is_packed else last  # cell that the token itself is written to
    length = tl.minimum(position + 1, ring)
    reach = reach_of(position, reach, in_chunks)
    begin = tl.where(position < ring, tl.maximum(position + 1 - reach, 0) // block * block, 0)
    piece_cells = tl.maximum(tl.cdiv(tl.cdiv(length - begin, pieces), block) * block, least)
    piece_cells = tl.where(length - begin <= 2 * least, 2 * least, piece_cells)
    start = begin + piece * piece_cells
    if start >= length:
        return
    end = tl.minimum(start + piece_cells, length)
    repeats: tl.constexpr = padded // many  # rows of a product that a query head fills: it needs 16 of them
    dims, steps, h, filled = tl.arange(0, width), tl.arange(0, block), tl.arange(0, many), tl.arange(0, padded)
    g = filled // repeats
    is_dim, is_query, is_head = dims < size, h < group, (g < group) & (filled % repeats == 0)
    head_cells: tl.constexpr = page_tokens * (size + 1 if fp8 else size)
    kv += head * head_cells
    base = kv + dims[None, :]
    kind: tl.constexpr = q.dtype.element_ty
    own_table = tables + table_row * table_stride
    key_exponents, value_exponents = steps, steps
    if stages == 0:
        pages = pages_of(own_table, start, end, block, page_tokens)
        is_seen = _seen(start + steps, last, ring, end, newest, reach)
        where = place_of(pages, start, block, page_tokens, size, page_stride)[:, None]
        if fp8:
            exponents = kv + exponents_of(pages, start, block, page_tokens, size, page_stride)
            key_exponents = tl.load(exponents, is_seen, 0, cache_modifier=".cg")
            value_exponents = tl.load(exponents + values_at, is_seen, 0, cache_modifier=".cg")
        pages = pages_of(own_table, start + block, end, block, page_tokens)  # a block ahead: their cells depend on them
        is_read = is_seen[:, None] & is_dim[None, :]
        keys = tl.load(base + where, is_read, 0, cache_modifier=".cg")
        values = tl.load(base + values_at + where, is_read, 0, cache_modifier=".cg")
    if rotation != 0:
        other, cos, sin, is_rotated = rotary_factors(dims, position, rotary_size, frequencies, factor, rotation)
        other = tl.where(is_rotated, other, dims)
    if has_norm:
        gain = tl.load(q_gain + dims, is_dim, 0.0).to(tl.float32)
        if rotation != 0:
            other_gain = tl.load(q_gain + other, is_rotated, 0.0).to(tl.float32)
    if uses_pdl:
        gdc_wait()
    # The group's queries, [many, width].
    sources = q + token * q_stride + (head * group + h)[:, None] * q_head_stride
    query = tl.load(sources + dims[None, :], is_query[:, None] & is_dim[None, :], 0.0).to(tl.float32)
    if rotation != 0:
        partner = tl.load(sources + other[None, :], is_query[:, None] & is_rotated[None, :], 0.0).to(tl.float32)
    if has_norm:
        normed = tl.rsqrt(tl.sum(query * query, 1) / size + eps)[:, None]
        query = query * normed * gain[None, :]
        if rotation != 0:
            partner = partner * normed * other_gain[None, :]
    if rotation != 0:
        query = query * cos[None, :] + partner * sin[None, :]
    query = query.to(q.dtype.element_ty)
    own_score = tl.full((many,), LEAST_SCORE, tl.float32)
    own_value = tl.zeros((width,), tl.float32)
    if (newest >= start) & (newest < end):
        source = k + token * kv_stride + head * kv_head_stride
        key = tl.load(source + dims, is_dim, 0.0).to(tl.float32)
        value = tl.load(v + token * kv_stride + head * kv_head_stride + dims, is_dim, 0.0)
        if rotation != 0:
            partner_key = tl.load(source + other, is_rotated, 0.0).to(tl.float32)
        if has_norm:
            key_factor = tl.rsqrt(tl.sum(key * key, 0) / size + eps)
            key = key * key_factor * tl.load(k_gain + dims, is_dim, 0.0).to(tl.float32)
            if rotation != 0:
                partner_key = partner_key * key_factor * tl.load(k_gain + other, is_rotated, 0.0).to(tl.float32)
        if rotation != 0:
            key = key * cos + partner_key * sin
        kept = key.to(kind)
        page = tl.load(own_table + newest // page_tokens).to(tl.int64)
        cell = kv + page * page_stride + (newest % page_tokens) * size + dims
        if fp8:
            exponent = kv + page * page_stride + page_tokens * size + newest % page_tokens
            keep_cell(cell, exponent, kept.to(tl.float32), is_dim)
            keep_cell(cell + values_at, exponent + values_at, value.to(tl.float32), is_dim)
        else:
            tl.store(cell, kept, is_dim)
            tl.store(cell + values_at, value, is_dim)
        own_score = tl.sum(query.to(tl.float32) * kept.to(tl.float32)[None, :], 1) * scale
        if has_cap:
            own_score = capped(own_score, cap)
        own_value = value.to(tl.float32)
    query = tl.reshape(tl.broadcast_to(query[:, None, :], (many, repeats, width)), (padded, width))
    own_score = tl.reshape(tl.broadcast_to(own_score[:, None], (many, repeats)), (padded,))
    most = tl.full((padded,), LEAST_SCORE, tl.float32)
    total = tl.zeros((padded, block), tl.float32)  # by place in a block: added up once, at the end
    sums = tl.zeros((padded, width), tl.float32)
    if stages == 0:
        for first in tl.range(start + block, end + block, block, num_stages=1):
            keys = numbers_of(keys, key_exponents, kind, fp8)
            weights, rescale, total, most = _weigh(query, keys, is_seen, most, total, scale, cap, has_cap)
            is_seen = _seen(first + steps, last, ring, end, newest, reach)
            where = place_of(pages, first, block, page_tokens, size, page_stride)[:, None]
            held = numbers_of(values, value_exponents, kind, fp8)
            if fp8:
                exponents = kv + exponents_of(pages, first, block, page_tokens, size, page_stride)
                key_exponents = tl.load(exponents, is_seen, 0)
                value_exponents = tl.load(exponents + values_at, is_seen, 0)
            pages = pages_of(own_table, first + block, end, block, page_tokens)
            is_read = is_seen[:, None] & is_dim[None, :]
            keys = tl.load(base + where, is_read, 0)
            sums = tl.dot(weights.to(kind), held, sums * rescale, input_precision="ieee")
            values = tl.load(base + values_at + where, is_read, 0)
    else:
        for first in tl.range(start, end, block, num_stages=stages):
            cells = first + steps
            is_seen = _seen(cells, last, ring, end, newest, reach)
            pages = tl.load(own_table + cells // page_tokens, cells < end, 0)  # as a block: it is copied ahead, too
            where = place_of(pages, first, block, page_tokens, size, page_stride)[:, None]
            is_read = is_seen[:, None] & is_dim[None, :]
            keys = tl.load(base + where, is_read, 0)
            values = tl.load(base + values_at + where, is_read, 0)
            if fp8:
                exponents = kv + exponents_of(pages, first, block, page_tokens, size, page_stride)
                keys = numbers_of(keys, tl.load(exponents, is_seen, 0), kind, fp8)
                values = numbers_of(values, tl.load(exponents + values_at, is_seen, 0), kind, fp8)
            weights, rescale, total, most = _weigh(query, keys, is_seen, most, total, scale, cap, has_cap)
            sums = tl.dot(weights.to(kind), values, sums * rescale, input_precision="ieee")
    highest = tl.maximum(most, own_score)
    if has_sinks:  # the first piece has it; there is always one
        sink = tl.load(sinks + head * group + g, (g < group) & (piece == 0), LEAST_SCORE) * LOG2_E
        highest = tl.maximum(highest, sink)
    gain_of_rest = tl.exp2(most - highest)
    own_gain = tl.where((newest >= start) & (newest < end), tl.exp2(own_score - highest), 0.0)
    totals = tl.sum(total, 1) * gain_of_rest + own_gain
    if has_sinks:
        totals += tl.exp2(sink - highest)
    sums = sums * gain_of_rest[:, None] + own_gain[:, None] * own_value[None, :]
    is_out = is_head[:, None] & is_dim[None, :]
    target = out + (token * heads + head) * group * size + g[:, None] * size + dims[None, :]
    parts = tl.cdiv(length - begin, piece_cells)
    if parts == 1:
        tl.store(target, (sums / totals[:, None]).to(out.dtype.element_ty), is_out)
        return
    # See grouped_pieces.
    stride: tl.constexpr = group * (width + 4)
    every = partial + (row * heads + head).to(tl.int64) * pieces * stride
    own = every + piece * stride
    tl.store(own + g[:, None] * width + dims[None, :], sums, is_head[:, None])
    tl.store(own + group * width + g, highest, is_head)
    tl.store(own + group * (width + 1) + g, totals, is_head)
    tl.debug_barrier()
    if tl.atomic_add(finished + row * heads + head, 1, sem="acq_rel", scope="gpu") != parts - 1:
        return
    sums, totals = merge_pieces(every, parts, group, many, width)
    tl.store(finished + row * heads + head, 0)
    target = out + (token * heads + head) * group * size + h[:, None] * size + dims[None, :]
    tl.store(target, (sums / totals[:, None]).to(out.dtype.element_ty), is_query[:, None] & is_dim[None, :])


def attend_groups(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    kv: Tensor,
    tables: Tensor,
    plan: Tensor,
    spec: AttentionSpec,
    norms: HeadNorms | None = None,
    sinks: Tensor | None = None,
    packed: Tensor | None = None,
    tiles: GroupTiles | None = None,
) -> Tensor:
    """Attend from the newest token of each row to its earlier tokens, and write its key and value.

    Args:
        q: [B, H, 1, D], or of packed rows [1, H, T, D]; the last axis without gaps.
        k: [B, Hkv, 1, D], likewise; None with packed rows: what is needed is in the cache, and q is rotated.
        v: as k.
        kv: a layer's cache, [2, pages, Hkv, PAGE, D].
        tables: int32 [B, width], pages of each row; of packed rows, of each slot.
        plan: of these rows; see plan_rows.
        spec: scale, cap, window or chunk, and rotary positions; not a bias.
        norms: RMS norms with one epsilon, before the rotation; None: none.
        sinks: fp32 [H], see positions.Attend; None: none.
        packed: [T, H, D], which takes the results of packed rows of one token; None: there is one token of each row.
        tiles: None: by shape.

    Returns:
        Of q's shape; [B, 1, H * D] is a view of it, or [1, T, H * D] of packed rows.
    """
    assert spec.bias is None, "a bias with groups of heads has no kernel"
    heads, size, kv_heads = q.shape[1], q.shape[3], kv.shape[2]
    rows, token_axis = len(plan) // FIELDS, 0 if packed is None else 2
    if k is not None and v is not None and k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    keys = q if k is None else k
    scratch, has_pdl = scratch_of(q.device), uses_pdl(q.device) and packed is None
    programs, processors = rows * kv_heads, scratch.processors
    is_many = packed is not None or programs > 2 * processors  # packed rows have one kernel, whatever their number
    tiles = tiles or (_MANY if is_many else _SOME if programs > processors // 4 else _FEW)
    pieces = max(1, min(MOST_PIECES, tiles.programs * processors // programs))
    group, width = heads // kv_heads, max(16, triton.next_power_of_2(size))
    partial, finished = scratch.get(programs, programs * pieces * group * (width + 4) if pieces > 1 else 0)
    block = max(16, min(tiles.block, _HELD // (width * q.dtype.itemsize)))
    out = torch.empty((rows, 1, heads, size), dtype=q.dtype, device=q.device) if packed is None else packed
    scores, rotary = scores_of(spec), spec.rotary if packed is None else None
    _attend_group[(kv_heads, pieces, rows)](
        q, keys, q if v is None else v, kv, tables, plan, out, rotary.inverse_frequencies if rotary else None,
        norms.query.weight if norms else None, norms.key.weight if norms else None, sinks, partial, finished,
        q.stride(token_axis), keys.stride(token_axis), q.stride(1), keys.stride(1), tables.stride(0), kv.stride(1),
        kv.stride(0), scores.scale, scores.cap, scores.reach, norms.query.eps if norms else 0.0,
        pieces, tiles.least, tiles.shares * processors, rotary.width if rotary else 0, rotary.factor if rotary else 1.0,
        group=group, many=triton.next_power_of_2(group), padded=max(16, triton.next_power_of_2(group)),
        page_tokens=kv.shape[3], size=size, width=width, block=block, stages=tiles.stages,
        has_cap=spec.softcap != 0, in_chunks=scores.in_chunks, is_packed=packed is not None, has_norm=norms is not None,
        has_sinks=sinks is not None, rotation=0 if rotary is None else 1 if rotary.is_by_pairs else 2, uses_pdl=has_pdl,
        fp8=fp8_kind(kv), num_warps=max(tiles.warps, width // 32), launch_pdl=has_pdl,
    )  # fmt: skip
    return out.transpose(1, 2) if packed is None else out[None].transpose(1, 2)
