"""Rows sorted by expert times the matrices of their experts: only matrices of experts that have rows are read.

The programs are as many as any choice may need. Each finds its expert and its rows from where the experts' rows end,
and those that are too many end at once; so a choice changes no shape, and a CUDA graph holds for all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..experts import ExpertMatrices, Experts
from ..fp8 import block_of
from .elements import activated, combined, converted
from .expert_choice import sort_by_expert
from .fp4_tiles import fp4_tile
from .launch import bytes_of, has_wide_memory, is_older, scales_of, uses_pdl


class Tiles(NamedTuple):
    """How a product is cut.

    Attributes:
        rows, outputs, inputs: of a tile.
        warps, stages: of a program; of wider numbers than halves there are fewer stages.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


# Chosen by what other grouped products take. Of other numbers than halves they are not measured yet.
_FEW, _SOME, _MANY = Tiles(16, 32, 128, 4, 4), Tiles(32, 64, 64, 4, 4), Tiles(128, 64, 64, 8, 3)
_OLDER_PACKED = Tiles(64, 64, 64, 4, 3)  # many rows times MXFP4 before Hopper, where more would spill registers
# Of halves: rows of an expert, on average, below which these are taken, into the middle and out of it. Of 60 each they
# are the quickest for Qwen3 30B-A3B's layer in bf16 on an H100 that spill no register (2026-11-28), within 1%: products
# of its 48 layers take 19.3 ms for 64 rows in place of 19.5, 20.3 for 256 in place of 21.3, 21.0 for 512 in place of
# 22.5, and 35.0 for 4,096 in place of 40.4.
_HALVES = (
    (16, Tiles(16, 32, 256, 4, 3), Tiles(16, 64, 128, 4, 4)),
    (32, Tiles(32, 64, 128, 8, 3), Tiles(32, 128, 128, 4, 3)),
    (64, Tiles(64, 64, 128, 4, 4), Tiles(32, 128, 128, 4, 3)),
    (128, Tiles(64, 64, 64, 4, 3), Tiles(64, 128, 64, 4, 4)),
    (1 << 30, Tiles(128, 128, 64, 8, 4), Tiles(128, 256, 64, 8, 4)),
)
_SUMMED = 1024  # numbers of a row that a program sums


@triton.jit
def find_rows(ends, block, experts, width: tl.constexpr, block_m: tl.constexpr):
    """Find the expert of a block of rows, and the first of these and behind the last; none: both are the same."""
    expert = tl.arange(0, width)
    end = tl.load(ends + expert, expert < experts, 0)
    begin = tl.load(ends + expert - 1, (expert > 0) & (expert < experts), 0)
    blocks = (end - begin + block_m - 1) // block_m
    before = tl.cumsum(blocks, 0) - blocks
    is_own = (before <= block) & (block < before + blocks)
    found = tl.sum(tl.where(is_own, expert, 0), 0)
    first = tl.sum(tl.where(is_own, begin + (block - before) * block_m, 0), 0)
    last = tl.sum(tl.where(is_own, end, 0), 0)
    return found, first, last


@triton.jit
def _add_product(sums, values, tile, scales, first, scale_width: tl.constexpr):
    """Add a product to sums, multiplied by the scales of its columns, from ``first`` on, where a block has its own."""
    if scale_width:
        sums += tl.dot(values, tile, input_precision="ieee") * tl.load(scales + first // scale_width)[None, :]
    else:
        sums = tl.dot(values, tile, sums, input_precision="ieee")
    return sums


@triton.jit
def _grouped(  # noqa: C901 (one kernel)
    y, x, weight, bias, scales, order, ends, counts, experts, outputs, inputs, used, factor, offset, limit,
    scale_first, scale_count, scale_width: tl.constexpr, has_scales: tl.constexpr, is_native: tl.constexpr,
    is_packed: tl.constexpr, is_into: tl.constexpr, is_gated: tl.constexpr, has_bias: tl.constexpr,
    activation: tl.constexpr, is_clamped: tl.constexpr, width: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr, uses_pdl: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows by a part of their expert's matrix.

    is_into: x has a row a token, [N, inputs], and y one a sorted pair, activated. Else x has one a sorted pair, and y
    one a pair, [pairs, outputs], multiplied by what the pair counts. is_gated: the matrix is twice as long.
    scale_width: see gemv. is_packed: matrix and scales are MXFP4.
    """
    if uses_pdl:
        gdc_launch_dependents()
        gdc_wait()
    expert, first, last = find_rows(ends, tl.program_id(1), experts, width, block_m)
    if first < last:
        row = first + tl.arange(0, block_m)
        is_row = row < last
        pair = tl.load(order + row, is_row, 0)
        source = (pair // used if is_into else row).to(tl.int64)
        n = tl.program_id(0) * block_n + tl.arange(0, block_n)
        is_n = n < outputs
        matrix_rows = outputs * 2 if is_gated else outputs
        at = weight + expert.to(tl.int64) * matrix_rows * inputs + tl.where(is_n, n, 0)[None, :].to(tl.int64) * inputs
        rows = x + source[:, None] * inputs
        scale_at = scales
        if is_packed:
            matrix_row = expert.to(tl.int64) * matrix_rows + tl.where(is_n, n, 0)
            numbers_at, powers_at = weight + matrix_row * (inputs // 2), scales + matrix_row * (inputs // 32)
        elif has_scales:
            scale_at = scales + (expert.to(tl.int64) * matrix_rows + tl.where(is_n, n, 0)) * scale_count
        sums = tl.zeros([block_m, block_n], tl.float32)
        others = tl.zeros([block_m, block_n], tl.float32)
        for start in tl.range(0, inputs, block_k, num_stages=stages):
            k = start + tl.arange(0, block_k)
            is_k = k < inputs
            values = tl.load(rows + k[None, :], is_row[:, None] & is_k[None, :], 0)
            if is_packed:
                tile = fp4_tile(numbers_at, powers_at, start, inputs, values.dtype, block_n, block_k, is_native)
            else:
                tile = converted(tl.load(at + k[:, None], is_k[:, None], 0.0), values.dtype, is_native)
            sums = _add_product(sums, values, tile, scale_at, scale_first + start, scale_width)
            if is_gated:
                if is_packed:
                    other_at = numbers_at + outputs.to(tl.int64) * (inputs // 2)
                    other_powers = powers_at + outputs.to(tl.int64) * (inputs // 32)
                    tile = fp4_tile(other_at, other_powers, start, inputs, values.dtype, block_n, block_k, is_native)
                else:
                    tile = tl.load(at + outputs.to(tl.int64) * inputs + k[:, None], is_k[:, None], 0.0)
                    tile = converted(tile, values.dtype, is_native)
                place = outputs * scale_count * scale_width + scale_first + start
                others = _add_product(others, values, tile, scale_at, place, scale_width)
        if has_scales and not scale_width:
            sums *= tl.load(scale_at)[None, :]
            if is_gated:
                others *= tl.load(scale_at + outputs)[None, :]
        if has_bias:
            bias_at = bias + expert * matrix_rows + n
            sums += tl.load(bias_at, is_n, 0).to(tl.float32)[None, :]
            if is_gated:
                others += tl.load(bias_at + outputs, is_n, 0).to(tl.float32)[None, :]
        if is_gated:
            sums = combined(sums, others, activation, is_clamped, factor, offset, limit)
        elif is_into:
            sums = activated(sums, activation)
        if is_into:
            target = row.to(tl.int64)
        else:
            target = pair.to(tl.int64)
            sums *= tl.load(counts + pair, is_row, 0)[:, None]
        tl.store(
            y + target[:, None] * outputs + n[None, :], sums.to(y.dtype.element_ty), is_row[:, None] & is_n[None, :]
        )


@triton.jit
def _sum(
    y, results, residual, width, used: tl.constexpr, has_residual: tl.constexpr, block: tl.constexpr,
    uses_pdl: tl.constexpr,
):  # fmt: skip
    """Sum what a token's experts have computed, [N, used, width], and add it to what there is."""
    if uses_pdl:
        gdc_launch_dependents()
        gdc_wait()
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for place in tl.static_range(used):
        total += tl.load(results + (row * used + place) * width + at, at < width, 0).to(tl.float32)
    if has_residual:
        total += tl.load(residual + row * width + at, at < width, 0).to(tl.float32)
    tl.store(y + row * width + at, total.to(y.dtype.element_ty), at < width)


def run_experts(layer: Experts, x: Tensor, chosen: Tensor, counts: Tensor, residual: Tensor | None = None) -> Tensor:
    """Sum what each token's experts compute of it; see Ops.run_experts."""
    (rows, used), experts, hidden = chosen.shape, layer.into.count, x.shape[1]
    order, ends = sort_by_expert(chosen, experts)
    assert layer.into.weight is not None and layer.out.weight is not None
    into_tiles, out_tiles = _tiles(layer.into, rows * used, x.device)
    inner = torch.empty(rows * used, layer.out.inputs, dtype=x.dtype, device=x.device)
    # Of experts elsewhere nothing is written.
    make = torch.empty if layer.first is None else torch.zeros
    results = make(rows * used, hidden, dtype=x.dtype, device=x.device)
    sorted_pairs, has_pdl = (order, ends, counts), uses_pdl(x.device)
    _launch(inner, x.contiguous(), layer.into, sorted_pairs, used, into_tiles, layer)
    _launch(results, inner, layer.out, sorted_pairs, used, out_tiles)
    y = torch.empty_like(x) if residual is None else residual
    _sum[(rows, triton.cdiv(hidden, _SUMMED))](
        y, results, residual, hidden, used=used, has_residual=residual is not None, block=_SUMMED, uses_pdl=has_pdl,
        num_warps=4, launch_pdl=has_pdl,
    )  # fmt: skip
    return y


def _tiles(matrices: ExpertMatrices, pairs: int, device: torch.device) -> tuple[Tiles, Tiles]:
    """Return how the products into the middle and out of it are cut."""
    assert matrices.weight is not None
    rows = pairs / matrices.count
    if matrices.weight.dtype in (torch.float16, torch.bfloat16) and has_wide_memory(device):
        return next((into, out) for most, into, out in _HALVES if rows < most)
    many = _OLDER_PACKED if matrices.is_packed and is_older(device) else _MANY
    tiles = many if rows >= 64 else _SOME if rows >= 16 else _FEW
    return tiles, tiles


def _launch(
    y: Tensor,
    x: Tensor,
    matrices: ExpertMatrices,
    sorted_pairs: tuple[Tensor, Tensor, Tensor],
    used: int,
    tiles: Tiles,
    function: Experts | None = None,
) -> None:
    """Launch a product; ``function`` is what follows the one into the middle, and None behind the other."""
    (order, ends, counts), weight = sorted_pairs, matrices.weight
    assert weight is not None
    pairs, outputs = y.shape
    experts, clamped, has_pdl = len(weight), function.clamped if function else None, uses_pdl(x.device)
    most = min(pairs, (pairs + min(pairs, experts) * (tiles.rows - 1)) // tiles.rows)
    gate = (clamped.factor, clamped.up_offset, clamped.limit or float("inf")) if clamped else (1.0, 0.0, 0.0)
    block_k = min(tiles.inputs, block_of(matrices.blocks)) if matrices.blocks else tiles.inputs
    _grouped[(triton.cdiv(outputs, tiles.outputs), most)](
        y, x, bytes_of(weight), matrices.bias, matrices.scales, order, ends, counts, experts, outputs, matrices.inputs,
        used, *gate, *scales_of(matrices.scales, matrices.blocks),
        has_scales=matrices.scales is not None and not matrices.is_packed, is_native=x.is_cuda,
        is_packed=matrices.is_packed, is_into=function is not None, is_gated=bool(function and function.is_gated),
        has_bias=matrices.bias is not None, activation=function.activation if function else "",
        is_clamped=clamped is not None, width=triton.next_power_of_2(experts), block_m=tiles.rows,
        block_n=tiles.outputs, block_k=block_k, stages=max(1, tiles.stages * 2 // x.element_size()),
        uses_pdl=has_pdl, num_warps=tiles.warps, launch_pdl=has_pdl,
    )  # fmt: skip
