"""Multiply FP8 weights by one row on the tensor cores, in the registers that both are loaded into.

To convert a weight to fp32 and multiply it takes three instructions; this takes less than one. The numbers of x are
written, 64 together, as h * unit with h of fp16, which has every FP8 number too. The tensor cores take 16 rows of 16
numbers, four of each row in every thread; here a row is what four neighbouring threads have of a row of the matrix, of
two rows at a time, and a column is what they have of x. So the products that count are those on the diagonal, each in
one of the four threads.
"""

import triton
import triton.language as tl

from .int8 import quarters


@triton.jit
def _pair(a, b, is_native: tl.constexpr):
    """Put two numbers of fp32 into a word of two of fp16."""
    if is_native:
        word = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        low, high = a.to(tl.float16).to(tl.int16, bitcast=True), b.to(tl.float16).to(tl.int16, bitcast=True)
        word = (low.to(tl.int32) & 65535) | (high.to(tl.int32) << 16)
    return word


@triton.jit
def _pairs(v, is_native: tl.constexpr):
    """Split fp32 [groups, 8] into four words, [groups] each."""
    even, odd = tl.split(tl.permute(tl.reshape(v, (v.shape[0], 2, 4)), (0, 2, 1)))
    a, b, c, d = quarters(even)
    e, f, g, h = quarters(odd)
    return _pair(a, b, is_native), _pair(c, d, is_native), _pair(e, f, is_native), _pair(g, h, is_native)


@triton.jit
def halves_of(first, second, is_native: tl.constexpr):
    """Return words of fp16, first and second four, and units, [groups] all of them, of fp32 [groups, 8] each."""
    groups: tl.constexpr = first.shape[0]
    most = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    most = tl.max(tl.reshape(most, (groups // 4, 4)), 1)[:, None]
    most = tl.reshape(tl.broadcast_to(most, (groups // 4, 4)), (groups,))
    exponent = tl.maximum(most, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    scale = (-0x7A000000 - exponent).to(tl.float32, bitcast=True)[:, None]  # 2**14 over the power of two below the most
    unit = (exponent - 0x07000000).to(tl.float32, bitcast=True)
    return _pairs(first * scale, is_native), _pairs(second * scale, is_native), unit


@triton.jit
def _number(words, place: tl.constexpr):
    """Take one of the four FP8 numbers of each word, as fp32."""
    bits = words >> (8 * place)
    bits = ((bits & 127) << 20) | ((bits & 128) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _half(words, place: tl.constexpr):
    return (words >> (16 * place)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def sums_of_words(weights, first, second, is_native: tl.constexpr):
    """Multiply weights, four a word [n, 4 * groups], by the words of x, and sum up: fp32 [n, groups].

    The sum of four groups stands in one of them, the others are 0. n: even.
    """
    rows: tl.constexpr = weights.shape[0]
    groups: tl.constexpr = weights.shape[1] // 4
    a, b, c, d = quarters(tl.reshape(weights, (rows, groups, 4)))
    if is_native:
        a, e = tl.split(tl.permute(tl.reshape(a, (rows // 2, 2, groups)), (0, 2, 1)))
        b, f = tl.split(tl.permute(tl.reshape(b, (rows // 2, 2, groups)), (0, 2, 1)))
        c, g = tl.split(tl.permute(tl.reshape(c, (rows // 2, 2, groups)), (0, 2, 1)))
        d, h = tl.split(tl.permute(tl.reshape(d, (rows // 2, 2, groups)), (0, 2, 1)))
        even, odd = tl.inline_asm_elementwise(
            """{ .reg .b16 l, h; .reg .b32 a, b, c, d, t, u; .reg .f32 p, q, r, s; .reg .pred is_odd, is_own;
            mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 c, h;
            mov.b32 {l, h}, $6; cvt.rn.f16x2.e4m3x2 b, l; cvt.rn.f16x2.e4m3x2 d, h;
            mov.f32 p, 0f00000000; mov.f32 q, 0f00000000; mov.f32 r, 0f00000000; mov.f32 s, 0f00000000;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {p, q, r, s}, {a, b, c, d}, {$10, $11}, {p, q, r, s};
            mov.b32 {l, h}, $3; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 c, h;
            mov.b32 {l, h}, $7; cvt.rn.f16x2.e4m3x2 b, l; cvt.rn.f16x2.e4m3x2 d, h;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {p, q, r, s}, {a, b, c, d}, {$12, $13}, {p, q, r, s};
            mov.b32 {l, h}, $4; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 c, h;
            mov.b32 {l, h}, $8; cvt.rn.f16x2.e4m3x2 b, l; cvt.rn.f16x2.e4m3x2 d, h;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {p, q, r, s}, {a, b, c, d}, {$14, $15}, {p, q, r, s};
            mov.b32 {l, h}, $5; cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 c, h;
            mov.b32 {l, h}, $9; cvt.rn.f16x2.e4m3x2 b, l; cvt.rn.f16x2.e4m3x2 d, h;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {p, q, r, s}, {a, b, c, d}, {$16, $17}, {p, q, r, s};
            mov.u32 t, %laneid; and.b32 u, t, 4; setp.ne.u32 is_odd, u, 0;
            and.b32 u, t, 3; shr.u32 t, t, 3; setp.eq.u32 is_own, t, u;
            selp.f32 p, q, p, is_odd; selp.f32 r, s, r, is_odd;
            selp.f32 $0, p, 0f00000000, is_own; selp.f32 $1, r, 0f00000000, is_own; }""",
            "=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
            [
                a, b, c, d, e, f, g, h,
                tl.broadcast_to(first[0][None, :], a.shape), tl.broadcast_to(first[1][None, :], a.shape),
                tl.broadcast_to(first[2][None, :], a.shape), tl.broadcast_to(first[3][None, :], a.shape),
                tl.broadcast_to(second[0][None, :], a.shape), tl.broadcast_to(second[1][None, :], a.shape),
                tl.broadcast_to(second[2][None, :], a.shape), tl.broadcast_to(second[3][None, :], a.shape),
            ],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )  # fmt: skip
        sums = tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), (rows, groups))
    else:
        sums = tl.zeros((rows, groups), tl.float32)
        parts = (a, b, c, d)
        words = first + second
        for place in tl.static_range(16):
            sums += _number(parts[place // 4], place % 4) * _half(words[place // 2], place % 2)[None, :]
    return sums
