"""Split rows of numbers into integers, which are multiplied with int8 weights without converting these.

Converting and multiplying a weight takes more than three instructions, and at the rate of an H200's memory that is most
of what its processors can do. So the numbers of x are written, 16 together, as q * unit with integers q of 15 bits, and
each q as two digits to base 256: dp4a multiplies four weights by four digits, and its sums are exact. The error of a
number is at most 2**-14 of the largest of the 16, a quarter of the largest rounding error of fp16 for that one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..linear import Norm
from .elements import moments
from .launch import norm_block, norm_kind, uses_pdl

_MOST = tl.constexpr(32512.0)  # its high digit is 127
GROUP = tl.constexpr(16)  # numbers that have one unit; they come in two halves, as a thread reads them


@triton.jit
def quarters(v):
    """Split [..., groups, 4] into four tensors [..., groups]."""
    even, odd = tl.split(tl.reshape(v, v.shape[:-1] + (2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _word(v, is_native: tl.constexpr):
    """Put the digits of four integers + 1.5 * 2**23, fp32 [groups, 4], into a word of low and one of high digits."""
    a, b, c, d = quarters(v)
    if is_native:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 front, back;
            prmt.b32 front, $2, $3, 0x0040; prmt.b32 back, $4, $5, 0x0040; prmt.b32 $0, front, back, 0x5410;
            prmt.b32 front, $2, $3, 0x0051; prmt.b32 back, $4, $5, 0x0051; prmt.b32 $1, front, back, 0x5410; }""",
            "=&r,=&r,r,r,r,r",
            [a, b, c, d],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        a, b = a.to(tl.int32, bitcast=True), b.to(tl.int32, bitcast=True)
        c, d = c.to(tl.int32, bitcast=True), d.to(tl.int32, bitcast=True)
        low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
        high = ((a >> 8) & 255) | (((b >> 8) & 255) << 8) | (((c >> 8) & 255) << 16) | ((d >> 8) << 24)
    return low, high


@triton.jit
def digits_of(first, second, is_native: tl.constexpr):
    """Return the words of low (0 to 255) and of high (-128 to 127) digits, four each, and units, [groups] all of them.

    first, second: fp32 [groups, 8], halves of each group.
    """
    most = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    exponent = tl.maximum(most, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    scale = (-0x7A800000 - exponent).to(tl.float32, bitcast=True)[:, None]  # 2**13 over the power of two below the most
    a, b = tl.split(tl.permute(tl.reshape(first * scale + 12582912.0, (first.shape[0], 2, 4)), (0, 2, 1)))
    c, d = tl.split(tl.permute(tl.reshape(second * scale + 12582912.0, (first.shape[0], 2, 4)), (0, 2, 1)))
    a_low, a_high = _word(a, is_native)
    b_low, b_high = _word(b, is_native)
    c_low, c_high = _word(c, is_native)
    d_low, d_high = _word(d, is_native)
    unit = (exponent - 0x06800000).to(tl.float32, bitcast=True)
    return (a_low, b_low, c_low, d_low), (a_high, b_high, c_high, d_high), unit


@triton.jit
def _dot(weights, digits, sums, is_signed: tl.constexpr, is_native: tl.constexpr):
    """Add the products of four weights and four digits to sums: int32 [n, groups]; digits [groups]."""
    digits = tl.broadcast_to(digits[None, :], weights.shape)
    if is_native:
        kind: tl.constexpr = "s32" if is_signed else "u32"
        sums = tl.inline_asm_elementwise(
            "dp4a.s32." + kind + " $0, $1, $2, $3;",
            "=r,r,r,r",
            [weights, digits, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        for place in tl.static_range(4):
            up: tl.constexpr = 24 - 8 * place
            digit = (digits << up) >> 24 if is_signed else (digits >> (8 * place)) & 255
            sums += ((weights << up) >> 24) * digit
    return sums


@triton.jit
def sums_of_groups(weights, low, high, is_native: tl.constexpr):
    """Multiply weights, four a word [n, 4 * groups], by the words of digits, and sum up: fp32 [n, groups]."""
    parts = quarters(tl.reshape(weights, (weights.shape[0], weights.shape[1] // 4, 4)))
    lows, highs = tl.zeros(parts[0].shape, tl.int32), tl.zeros(parts[0].shape, tl.int32)
    for place in tl.static_range(4):
        lows = _dot(parts[place], low[place], lows, False, is_native)
        highs = _dot(parts[place], high[place], highs, True, is_native)
    return (highs * 256 + lows).to(tl.float32)


@triton.jit
def normed(x, gain, shift, k, inputs, mean, scale, norm: tl.constexpr, has_shift: tl.constexpr):
    """Load columns of a row, and normalize them; those behind the row's end are 0."""
    v = tl.load(x + k, k < inputs, 0).to(tl.float32)
    if norm != "":
        v = (v - mean) * scale * tl.load(gain + k, k < inputs, 0).to(tl.float32)
        if has_shift:
            v += tl.load(shift + k, k < inputs, 0).to(tl.float32)
        v = tl.where(k < inputs, v, 0.0)
    return v


@triton.jit
def _four_bits(v):
    """Round to numbers that FP8 has, below its largest: of four bits, or multiples of 2**-9.

    To convert there and back gives wrong numbers in a loop: ptxas 12.8 keeps some in registers of the step before.
    """
    near = ((v.to(tl.int32, bitcast=True) + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(v) < 0.015625, (v + 24576.0) - 24576.0, near)


@triton.jit
def _split_rows(
    digits, units, x, gain, shift, inputs, eps,
    norm: tl.constexpr, has_shift: tl.constexpr, uses_pdl: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write norm(x [rows, inputs]) = (256 * high + low) * units, or (16 * high + low) * units of FP8: a program a row.

    digits: [2, rows, inputs], all high ones, then all low ones; int8, -128 to 127, or FP8. units: fp32 [rows], so that
    the largest number of a row becomes 32512, or high less than 256; not a number where a row has one that is not
    finite.
    """
    is_fp8: tl.constexpr = digits.dtype.element_ty == tl.float8e4nv
    if uses_pdl:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    x += row * inputs
    mean, scale = 0.0, 1.0
    if norm != "":
        mean, scale = moments(x, inputs, eps, norm == "rms", block)
    most = tl.full([block], 1e-30, tl.float32)
    fault = tl.zeros([block], tl.float32)
    for start in range(0, inputs, block):
        v = normed(x, gain, shift, start + tl.arange(0, block), inputs, mean, scale, norm, has_shift)
        most = tl.maximum(most, tl.abs(v))
        fault += v * 0.0
    highest = tl.max(most, 0)
    factor, unit = _MOST / highest, highest / _MOST
    if is_fp8:
        exponent = highest.to(tl.int32, bitcast=True) & 0x7F800000
        factor = (-0x7D800000 - exponent).to(tl.float32, bitcast=True)  # 2**7 over the power of two below the highest
        unit = (exponent - 0x05800000).to(tl.float32, bitcast=True)
    tl.store(units + row, unit + tl.sum(fault, 0))
    for start in range(0, inputs, block):
        k = start + tl.arange(0, block)
        v = normed(x, gain, shift, k, inputs, mean, scale, norm, has_shift)
        at = digits + row.to(tl.int64) * inputs + k
        low_at = at + tl.num_programs(0).to(tl.int64) * inputs
        if is_fp8:
            high = _four_bits(v * factor)
            low = ((v * factor - high) * 16.0).to(tl.float8e4nv)
            high = high.to(tl.float8e4nv)
        else:
            # Rounded to an integer by adding a number so large that there are no fractions beside it.
            q = (v * factor + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + 128
            high, low = (q >> 8).to(tl.int8), ((q & 255) - 128).to(tl.int8)
        tl.store(at, high, k < inputs)
        tl.store(low_at, low, k < inputs)


def split_rows(x: Tensor, norm: Norm | None, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split norm(x) into digits, int8 or FP8 [2, rows, inputs], and units, fp32 [rows]; see the kernel."""
    rows, width = x.shape
    digits = torch.empty(2, rows, width, dtype=kind, device=x.device)
    units = torch.empty(rows, dtype=torch.float32, device=x.device)
    gain, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    has_pdl = uses_pdl(x.device)
    _split_rows[(rows,)](
        digits, units, x, gain, shift, width, eps,
        norm=norm_kind(norm), has_shift=shift is not None, uses_pdl=has_pdl, block=norm_block(width), num_warps=8,
        launch_pdl=has_pdl,
    )  # fmt: skip
    return digits, units
