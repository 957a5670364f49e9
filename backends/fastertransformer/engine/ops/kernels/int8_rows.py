"""Rows as integers, for products with int8; each may be normed before."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .elements import moments

_MOST = tl.constexpr(32512.0)  # its high digit is 127


@triton.jit
def _normed(x, gain, shift, k, inputs, mean, scale, norm: tl.constexpr, has_shift: tl.constexpr):
    v = tl.load(x + k, k < inputs, 0).to(tl.float32)
    if norm != "":
        v = (v - mean) * scale * tl.load(gain + k, k < inputs, 0).to(tl.float32)
        if has_shift:
            v += tl.load(shift + k, k < inputs, 0).to(tl.float32)
        v = tl.where(k < inputs, v, 0.0)
    return v


@triton.jit
def digit_rows(
    digits, units, x, gain, shift, inputs, eps,
    norm: tl.constexpr, has_shift: tl.constexpr, is_chained: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Write norm(x [rows, inputs]) = (256 * high + low) * units: a program a row.

    digits: int8 [2, rows, inputs], all high ones, then all low ones, -128 to 127 each. units: fp32 [rows], so that the
    largest number of a row becomes 32512; not a number where a row has one that is not finite.
    """
    if is_chained:
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
        v = _normed(x, gain, shift, start + tl.arange(0, block), inputs, mean, scale, norm, has_shift)
        most = tl.maximum(most, tl.abs(v))
        fault += v * 0.0
    highest = tl.max(most, 0)
    tl.store(units + row, highest / _MOST + tl.sum(fault, 0))
    for start in range(0, inputs, block):
        k = start + tl.arange(0, block)
        v = _normed(x, gain, shift, k, inputs, mean, scale, norm, has_shift)
        # Rounded to an integer by adding a number so large that there are no fractions beside it.
        q = (v * (_MOST / highest) + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + 128
        at = digits + row.to(tl.int64) * inputs + k
        tl.store(at, (q >> 8).to(tl.int8), k < inputs)
        tl.store(at + tl.num_programs(0).to(tl.int64) * inputs, ((q & 255) - 128).to(tl.int8), k < inputs)
