"""A row of numbers as integers, to be multiplied with int8 weights as they are.

To widen a weight and to multiply it takes more than three instructions, and at the rate of an H200's memory that is
most of what its processors can do. So the numbers of x are written, 16 together, as q * unit with integers q of 15
bits, and those in two digits to base 256: dp4a multiplies four weights by four digits, and its sums are exact. A number
is off by at most 2**-14 of the largest of the 16, a quarter of what fp16 may have rounded off that one.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(16)  # numbers that have one unit; they come in two halves, as a thread reads them


@triton.jit
def _words(v, is_native: tl.constexpr):
    """Put the digits of integers + 1.5 * 2**23, fp32 [groups, 8], into words by fours [groups, 2]."""
    groups: tl.constexpr = v.shape[0]
    if is_native:
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 a, b;
            prmt.b32 a, $8, $9, 0x0040; prmt.b32 b, $10, $11, 0x0040; prmt.b32 $0, a, b, 0x5410;
            prmt.b32 a, $8, $9, 0x0051; prmt.b32 b, $10, $11, 0x0051; prmt.b32 $4, a, b, 0x5410;
            mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0; }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
            [v],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=4,
        )
    else:
        q, shift = v.to(tl.int32, bitcast=True), (tl.arange(0, 8) % 4 * 8)[None, :]
        low, high = (q & 255) << shift, ((q >> 8) & 255) << shift
    return tl.sum(tl.reshape(low, (groups, 2, 4)), 2), tl.sum(tl.reshape(high, (groups, 2, 4)), 2)


@triton.jit
def digits_of(first, second, is_native: tl.constexpr):
    """Give low (0 to 255) and high (-128 to 127) digits, four a word [groups * 4], and units, fp32 [groups].

    first, second: fp32 [groups, 8], halves of each group.
    """
    most = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    exponent = tl.maximum(most, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    scale = (-0x7A800000 - exponent).to(tl.float32, bitcast=True)[:, None]  # 2**13 over the power of two below the most
    low, high = _words(first * scale + 12582912.0, is_native)
    lower, higher = _words(second * scale + 12582912.0, is_native)
    words: tl.constexpr = first.shape[0] * 4
    low = tl.reshape(tl.permute(tl.join(low, lower), (0, 2, 1)), (words,))
    high = tl.reshape(tl.permute(tl.join(high, higher), (0, 2, 1)), (words,))
    return low, high, (exponent - 0x06800000).to(tl.float32, bitcast=True)


@triton.jit
def sums_of_groups(weights, low, high, is_native: tl.constexpr):
    """Multiply weights, four a word [n, words], by digits [words], and sum up each group: fp32 [n, words / 4]."""
    if is_native:
        sums = tl.inline_asm_elementwise(
            """{ .reg .b32 low, high;
            dp4a.s32.u32 low, $4, $8, 0; dp4a.s32.s32 high, $4, $12, 0;
            dp4a.s32.u32 low, $5, $9, low; dp4a.s32.s32 high, $5, $13, high;
            dp4a.s32.u32 low, $6, $10, low; dp4a.s32.s32 high, $6, $14, high;
            dp4a.s32.u32 low, $7, $11, low; dp4a.s32.s32 high, $7, $15, high;
            mad.lo.s32 $0, high, 256, low; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; }""",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r",
            [weights, low[None, :], high[None, :]],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    else:
        sums = tl.zeros(weights.shape, tl.int32)
        for place in tl.static_range(4):
            up: tl.constexpr = 24 - 8 * place
            q = ((high << up) >> 24) * 256 + ((low >> (8 * place)) & 255)
            sums += ((weights << up) >> 24) * q[None, :]
    return tl.sum(tl.reshape(sums, (weights.shape[0], weights.shape[1] // 4, 4)), 2).to(tl.float32)
