"""Products of many rows with a matrix of FP8 on tensor cores that multiply FP8: rows are rounded to it first.

Where the columns of the matrix have scales by block, rows have them by the same blocks: each block's products are
summed by themselves, and multiplied by both scales before they are added up in fp32. Where each row of the matrix has
one scale, so has each row of x, and the product is torch's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..fp8 import LARGEST
from ..linear import Blocks, Norm
from .elements import activated, moments
from .int8 import normed
from .launch import norm_kind, scratch_of, uses_pdl

_LARGEST = tl.constexpr(LARGEST)


class Tiles(NamedTuple):
    """How a product is cut.

    Attributes:
        rows, outputs: of a tile, which is as wide as a block.
        warps, stages: of a program.
    """

    rows: int
    outputs: int
    warps: int
    stages: int


_MOST_BLOCK = 16384  # numbers of a row that a program rounds at a time

# Chosen by what such products usually take, and not measured yet.
_FEW, _SOME, _MANY = Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 4), Tiles(128, 128, 8, 4)


@triton.jit
def _numbers(
    x, gain, shift, k, inputs, mean, unit, norm: tl.constexpr, has_shift: tl.constexpr, is_gated: tl.constexpr,
    activation: tl.constexpr,
):  # fmt: skip
    """Load columns of a row, normed or gated; a gated one is rounded to x's type, as what gates alone returns."""
    if is_gated:
        first = tl.load(x + k, k < inputs, 0).to(tl.float32)
        second = tl.load(x + inputs + k, k < inputs, 0).to(tl.float32)
        v = (activated(first, activation) * second).to(x.dtype.element_ty).to(tl.float32)
    else:
        v = normed(x, gain, shift, k, inputs, mean, unit, norm, has_shift)
    return v


@triton.jit
def _normed_whole(v, gain, shift, k, inputs, eps, norm: tl.constexpr, has_shift: tl.constexpr):
    """Norm a row that is one block; see elements.moments."""
    mean = tl.sum(v, 0) / inputs if norm == "layer" else 0.0
    v = tl.where(k < inputs, v - mean, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / inputs + eps) * tl.load(gain + k, k < inputs, 0).to(tl.float32)
    if has_shift:
        v += tl.load(shift + k, k < inputs, 0).to(tl.float32)
    return v


@triton.jit(do_not_specialize=["rows"])
def _round_rows(  # noqa: C901 (one kernel)
    codes, scales, x, gain, shift, inputs, groups, rows, eps,
    norm: tl.constexpr, has_shift: tl.constexpr, group: tl.constexpr, uses_pdl: tl.constexpr, block: tl.constexpr,
    is_gated: tl.constexpr, activation: tl.constexpr, is_whole: tl.constexpr,
):  # fmt: skip
    """Write norm(x [inputs]) / scales to codes, so that the largest number is E4M3's: a program a row.

    group: of columns that have one scale, whose rows' scales lie together; 0: all columns have one.
    is_gated: whether x is [2 * inputs], and what is rounded is activation(first half) * second half.
    is_whole: whether a row is one block, which stays in registers.
    """
    if uses_pdl:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x += row * (2 * inputs if is_gated else inputs)
    codes += row * inputs
    mean, unit = 0.0, 1.0
    if is_whole:
        k = tl.arange(0, block)
        v = _numbers(x, gain, shift, k, inputs, mean, unit, "", False, is_gated, activation)
        if norm != "":
            v = _normed_whole(v, gain, shift, k, inputs, eps, norm, has_shift)
    elif norm != "":
        mean, unit = moments(x, inputs, eps, norm == "rms", block)
    highest = 0.0
    if not group:
        most, fault = tl.full([block], 1e-12 * _LARGEST, tl.float32), tl.zeros([block], tl.float32)
        if is_whole:
            most, fault = tl.maximum(most, tl.abs(v)), v * 0.0
        else:
            for start in range(0, inputs, block):
                k = start + tl.arange(0, block)
                v = _numbers(x, gain, shift, k, inputs, mean, unit, norm, has_shift, is_gated, activation)
                most = tl.maximum(most, tl.abs(v))
                fault += v * 0.0  # not a number where one is not finite, and so is the scale
        highest = tl.max(most, 0)
        tl.store(scales + row, highest / _LARGEST + tl.sum(fault, 0))
    for start in range(0, inputs, block):
        k = start + tl.arange(0, block)
        if not is_whole:
            v = _numbers(x, gain, shift, k, inputs, mean, unit, norm, has_shift, is_gated, activation)
        if group:
            grouped = tl.reshape(v, [block // group, group])
            own = tl.maximum(tl.max(tl.abs(grouped), 1), 1e-12 * _LARGEST)
            place = start // group + tl.arange(0, block // group)
            tl.store(scales + place * rows + row, own / _LARGEST + tl.sum(grouped * 0.0, 1), place < groups)
            v = tl.reshape(grouped * _LARGEST / own[:, None], [block])
        else:
            v = v * _LARGEST / highest
        v = tl.minimum(tl.maximum(v, -_LARGEST), _LARGEST)
        tl.store(codes + k, v.to(codes.dtype.element_ty), k < inputs)


def round_rows(
    x: Tensor, norm: Norm | None, blocks: Blocks | None, activation: str | None = None
) -> tuple[Tensor, Tensor]:
    """Round norm(x), [rows, inputs], to FP8 -> numbers, and scales, fp32 [rows, 1], or of blocks [blocks, rows].

    With an activation x is [rows, 2 * inputs], and activation(first half) * second half is rounded; there is no norm.
    """
    (rows, width), group, is_gated = x.shape, blocks.width if blocks else 0, activation is not None
    width //= 1 + is_gated
    codes = torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device)
    groups = width // group if group else 1
    scales = torch.empty((groups, rows) if group else (rows, 1), dtype=torch.float32, device=x.device)
    gain, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    has_pdl, block = uses_pdl(x.device), min(int(triton.next_power_of_2(width)), _MOST_BLOCK)
    _round_rows[(rows,)](
        codes, scales, x, gain, shift, width, groups, rows, eps,
        norm=norm_kind(norm), has_shift=shift is not None, group=group, uses_pdl=has_pdl, block=block,
        is_gated=is_gated, activation=activation or "", is_whole=width <= block,
        num_warps=max(8, block // 1024), launch_pdl=has_pdl,
    )  # fmt: skip
    return codes, scales


@triton.jit(do_not_specialize=["rows"])
def _multiply_blocks(
    y, x, units, weight, scales, rows, outputs, inputs, uses_pdl: tl.constexpr, block_m: tl.constexpr,
    block_n: tl.constexpr, width: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Compute y [rows, outputs] = (x * units) @ (weight * scales).T.

    units, scales: [blocks, rows] and [blocks, outputs]: what a step needs lies together.
    """
    m = tl.program_id(0) * block_m + tl.arange(0, block_m)
    n = tl.program_id(1) * block_n + tl.arange(0, block_n)
    is_m, is_n, steps = m < rows, n < outputs, inputs // width
    row, column = tl.where(is_m, m, 0).to(tl.int64), tl.where(is_n, n, 0).to(tl.int64)
    k = tl.arange(0, width)
    values, tiles = x + row[:, None] * inputs + k[None, :], weight + column[None, :] * inputs + k[:, None]
    units += row
    scales += column
    if uses_pdl:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros([block_m, block_n], tl.float32)
    for step in tl.range(0, steps, num_stages=stages):
        product = tl.dot(tl.load(values + step * width), tl.load(tiles + step * width))
        sums += product * tl.load(units + step * rows)[:, None] * tl.load(scales + step * outputs)[None, :]
    at = y + m[:, None].to(tl.int64) * outputs + n[None, :]
    tl.store(at, sums.to(y.dtype.element_ty), is_m[:, None] & is_n[None, :])


def multiply_blocks(
    codes: Tensor, units: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype, tiles: Tiles | None = None
) -> Tensor:
    """Multiply rounded rows by a matrix of FP8, [out, in], with scales by block, [blocks, out] -> [rows, out]."""
    (rows, inputs), outputs = codes.shape, len(weight)
    tiles = tiles or _choose(rows, outputs, scratch_of(codes.device).processors)
    has_pdl = uses_pdl(codes.device)
    y = torch.empty(rows, outputs, dtype=dtype, device=codes.device)
    _multiply_blocks[(triton.cdiv(rows, tiles.rows), triton.cdiv(outputs, tiles.outputs))](
        y, codes, units, weight, scales, rows, outputs, inputs, uses_pdl=has_pdl, block_m=tiles.rows,
        block_n=tiles.outputs, width=inputs // len(units), stages=tiles.stages, num_warps=tiles.warps,
        launch_pdl=has_pdl,
    )  # fmt: skip
    return y


def _choose(rows: int, outputs: int, processors: int) -> Tiles:
    if rows <= _FEW.rows:
        return _FEW
    is_busy = triton.cdiv(rows, _MANY.rows) * triton.cdiv(outputs, _MANY.outputs) >= processors
    return _MANY if is_busy else _SOME
