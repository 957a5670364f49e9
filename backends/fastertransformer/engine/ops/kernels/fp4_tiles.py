"""MXFP4 in registers: numbers of 4 bits (E2M1), two to a byte, times the power of two (E8M0) of each 32 of a row.

Both become bf16 or fp32, in which each product of them is exact.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .elements import converted

_GROUP = tl.constexpr(32)


@triton.jit
def _number(code):
    """Return E2M1 as fp32: its bits are the lowest of the exponent and the highest of the mantissa."""
    magnitude = (code & 7).to(tl.int32)
    bits = (magnitude << 22) + (126 << 23)
    number = tl.where(magnitude < 2, 0.5 * magnitude, bits.to(tl.float32, bitcast=True))
    return tl.where(code < 8, number, -number)


@triton.jit
def _numbers(packed, dtype: tl.constexpr, is_native: tl.constexpr):
    """Return the numbers in the lower and in the upper half of each byte, as bf16 for it, else as fp32.

    For bf16 two at a time are put where its bits are, and are then 2**126 too small.
    """
    if dtype == tl.bfloat16 and is_native:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 first, second, part, sign, up, zero; mov.b32 up, 0x7E807E80; mov.b32 zero, 0x80008000;
            prmt.b32 first, $4, 0, 0x1404; prmt.b32 second, $4, 0, 0x3424;
            and.b32 sign, first, 0x80008000; shr.b32 part, first, 6; and.b32 part, part, 0x01C001C0;
            or.b32 part, part, sign; fma.rn.bf16x2 $2, part, up, zero;
            and.b32 sign, second, 0x80008000; shr.b32 part, second, 6; and.b32 part, part, 0x01C001C0;
            or.b32 part, part, sign; fma.rn.bf16x2 $3, part, up, zero;
            shl.b32 first, first, 4; shl.b32 second, second, 4;
            and.b32 sign, first, 0x80008000; shr.b32 part, first, 6; and.b32 part, part, 0x01C001C0;
            or.b32 part, part, sign; fma.rn.bf16x2 $0, part, up, zero;
            and.b32 sign, second, 0x80008000; shr.b32 part, second, 6; and.b32 part, part, 0x01C001C0;
            or.b32 part, part, sign; fma.rn.bf16x2 $1, part, up, zero; }""",
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        return _number(packed & 15), _number(packed >> 4)


@triton.jit
def _powers(at, start, inputs, block_k: tl.constexpr):
    """Load the powers of two of some columns of rows that begin ``at``, fp32 [rows, block_k / 32]."""
    group = start // _GROUP + tl.arange(0, block_k // _GROUP)
    exponents = tl.load(at[:, None] + group[None, :], (group < inputs // _GROUP)[None, :], 0).to(tl.int32)
    return tl.where(exponents == 0, 5.877471754111438e-39, (exponents << 23).to(tl.float32, bitcast=True))


@triton.jit
def fp4_tile(
    at, powers_at, start, inputs, dtype: tl.constexpr, rows: tl.constexpr, block_k: tl.constexpr,
    is_native: tl.constexpr,
):  # fmt: skip
    """Load some columns, from ``start`` on, of rows that begin at pointers, [rows] -> [block_k, rows] of a type."""
    byte = start // 2 + tl.arange(0, block_k // 2)
    packed = tl.load(at[:, None] + byte[None, :], (byte < inputs // 2)[None, :], 0)
    powers = _powers(powers_at, start, inputs, block_k)
    low, high = _numbers(packed, dtype, is_native)
    numbers = tl.reshape(tl.interleave(low, high), (rows, block_k // _GROUP, _GROUP))
    scaled = numbers * powers.to(numbers.dtype)[:, :, None]
    return tl.trans(tl.reshape(scaled, (rows, block_k))).to(dtype)


@triton.jit
def fp4_row_times(
    at, powers_at, x, gain, inputs, has_norm: tl.constexpr, steps: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, is_native: tl.constexpr,
):  # fmt: skip
    """Do what few_experts._row_times does with rows of MXFP4; their powers of two multiply sums of 32 products."""
    sums = tl.zeros([block_n, block_k // _GROUP], tl.float32)
    squares = tl.zeros([block_k // 2], tl.float32)
    for step in tl.static_range(steps):
        byte = step * (block_k // 2) + tl.arange(0, block_k // 2)
        is_in = byte < inputs // 2
        packed = tl.load(at[:, None] + byte[None, :], is_in[None, :], 0, eviction_policy="evict_first")
        powers = _powers(powers_at, step * block_k, inputs, block_k)
        even, odd = tl.load(x + 2 * byte, is_in, 0).to(tl.float32), tl.load(x + 2 * byte + 1, is_in, 0).to(tl.float32)
        if has_norm:
            squares += even * even + odd * odd
            even *= tl.load(gain + 2 * byte, is_in, 0).to(tl.float32)
            odd *= tl.load(gain + 2 * byte + 1, is_in, 0).to(tl.float32)
        low, high = _numbers(packed, x.dtype.element_ty, is_native)
        products = converted(low, tl.float32, is_native) * even[None, :]
        products += converted(high, tl.float32, is_native) * odd[None, :]
        sums += tl.sum(tl.reshape(products, (block_n, block_k // _GROUP, _GROUP // 2)), 2) * powers
    return tl.sum(sums, 1), tl.sum(squares, 0)
