"""Device functions that several kernels share."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def moments(x, inputs, eps, is_rms: tl.constexpr, block: tl.constexpr):
    """Mean (0 for a root mean square) and 1 / standard deviation of x [inputs], fp32.

    Two passes where there is a mean, as in torch: the mean of squares minus the square of the mean loses precision.
    """
    mean = 0.0
    if not is_rms:
        sums = tl.zeros([block], tl.float32)
        for start in range(0, inputs, block):
            k = start + tl.arange(0, block)
            sums += tl.load(x + k, k < inputs, 0).to(tl.float32)
        mean = tl.sum(sums, 0) / inputs
    sums = tl.zeros([block], tl.float32)
    for start in range(0, inputs, block):
        k = start + tl.arange(0, block)
        away = tl.load(x + k, k < inputs, 0).to(tl.float32) - mean
        sums += tl.where(k < inputs, away * away, 0.0)
    return mean, tl.rsqrt(tl.sum(sums, 0) / inputs + eps)


@triton.jit
def converted(tile, dtype: tl.constexpr, is_native: tl.constexpr):
    """Convert a tile to another type; int8 by putting its bytes into the mantissa of 1024 or 2**23.

    The usual conversion of integers runs at a quarter of the rate that the memory delivers them at. uint8 is what a
    GPU without FP8 takes its bytes (E4M3) as: they become the upper bits of numbers that are then 2**120 too small.
    """
    if (tile.dtype == tl.float8e4nv or tile.dtype == tl.uint8) and dtype == tl.bfloat16 and is_native:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 low, high, sign, up, zero; mov.b32 up, 0x7B807B80; mov.b32 zero, 0x80008000;
            prmt.b32 low, $2, 0, 0x1404; prmt.b32 high, $2, 0, 0x3424;
            and.b32 sign, low, 0x80008000; shr.b32 low, low, 4; and.b32 low, low, 0x07F007F0; or.b32 low, low, sign;
            and.b32 sign, high, 0x80008000; shr.b32 high, high, 4; and.b32 high, high, 0x07F007F0;
            or.b32 high, high, sign; fma.rn.bf16x2 $0, low, up, zero; fma.rn.bf16x2 $1, high, up, zero; }""",
            "=r,=r,r",
            [tile.to(tl.uint8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    if tile.dtype == tl.uint8:
        bits = tile.to(tl.int32)
        bits = ((bits & 127) << 20) | ((bits & 128) << 24)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    if tile.dtype == tl.bfloat16 and dtype == tl.float32 and is_native:
        # The upper half of each number; two stay in one register until they are needed.
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;",
            "=&r,=r,r",
            [tile],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    if tile.dtype != tl.int8 or not is_native:
        return tile.to(dtype)
    if dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 bytes, zero; mov.b32 zero, 0x64806480; xor.b32 bytes, $2, 0x80808080;
            prmt.b32 $0, bytes, 0x64646464, 0x4140; prmt.b32 $1, bytes, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, zero; sub.f16x2 $1, $1, zero; }""",
            "=r,=r,r",
            [tile],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    wide = tl.inline_asm_elementwise(
        """{ .reg .b32 bytes; xor.b32 bytes, $4, 0x80808080;
        prmt.b32 $0, bytes, 0x4B000000, 0x7540; prmt.b32 $1, bytes, 0x4B000000, 0x7541;
        prmt.b32 $2, bytes, 0x4B000000, 0x7542; prmt.b32 $3, bytes, 0x4B000000, 0x7543;
        sub.f32 $0, $0, 0f4B000080; sub.f32 $1, $1, 0f4B000080;
        sub.f32 $2, $2, 0f4B000080; sub.f32 $3, $3, 0f4B000080; }""",
        "=r,=r,=r,=r,r",
        [tile],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )
    return wide.to(dtype)


@triton.jit
def activated(y, activation: tl.constexpr):
    """Apply gelu by tanh (as x * sigmoid: the same function), exact_gelu, relu, squared_relu, silu, or nothing."""
    if activation == "gelu":
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif activation == "exact_gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif activation == "relu":
        y = tl.maximum(y, 0.0)
    elif activation == "squared_relu":
        y = tl.maximum(y, 0.0)
        y = y * y
    elif activation == "silu":
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def rows_of(block: tl.constexpr, first, is_gated: tl.constexpr):
    """Number the rows of a tile from ``first`` on; of two matrices they alternate. Also: which are the other's."""
    lane = tl.arange(0, block)
    if is_gated:
        n, is_other = first // 2 + lane // 2, lane % 2 == 1
    else:
        n, is_other = first + lane, lane < 0
    return n, is_other


@triton.jit
def load_vector(vector, other, n, is_other, is_n, is_gated: tl.constexpr):
    """Load the numbers of a tile's rows, in fp32; see rows_of."""
    if is_gated:
        numbers = tl.load(vector + n, is_n & (is_other == 0), 0).to(tl.float32)
        numbers += tl.load(other + n, is_n & is_other, 0).to(tl.float32)
    else:
        numbers = tl.load(vector + n, is_n, 0).to(tl.float32)
    return numbers


@triton.jit
def gated(y, activation: tl.constexpr):
    """Return activation(the even ones) * the odd ones along the last axis of y."""
    half: tl.constexpr = y.shape[len(y.shape) - 1] // 2
    first, second = tl.split(tl.reshape(y, y.shape[:-1] + (half, 2)))
    return activated(first, activation) * second


@triton.jit
def combined(gate, up, activation: tl.constexpr, is_clamped: tl.constexpr, factor, offset, limit):
    """Multiply what is activated by the other; see gates.ClampedGate."""
    if is_clamped:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + offset
        gate = gate * tl.sigmoid(factor * gate)
    else:
        gate = activated(gate, activation)
    return gate * up


@triton.jit
def cos_sin(angle):
    """Return cosine and sine of angles of at most 2^17, in fp32 and with an error of some 1e-7.

    Reduced as by Cody & Waite (1980), polynomials of Moshier's Cephes (sinf.c). CUDA's own functions take any angle,
    and several times the instructions.
    """
    quarter = tl.floor(angle * 0.6366197723675814 + 0.5)
    rest = tl.fma(quarter, -1.5703125, angle)
    rest = tl.fma(quarter, -4.837512969970703e-4, rest)
    rest = tl.fma(quarter, -7.549789948768648e-8, rest)
    square = rest * rest
    sin = ((-1.9515295891e-4 * square + 8.3321608736e-3) * square - 1.6666654611e-1) * square * rest + rest
    cos = (2.443315711809948e-5 * square - 1.388731625493765e-3) * square + 4.166664568298827e-2
    cos = cos * square * square - 0.5 * square + 1.0
    turns = quarter.to(tl.int32)
    is_odd = turns % 2 != 0
    first, second = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    return tl.where((turns + 1) & 2 != 0, -first, first), tl.where(turns & 2 != 0, -second, second)


@triton.jit
def rotary_factors(dims, position, rotary_size, frequencies, factor, rotation: tl.constexpr):
    """How rotary positions change the numbers of a head: x[dims] * cos + x[other] * sin where is_rotated.

    rotation: 1 by pairs (``other`` is the neighbour), 2 by halves (``other`` is half of rotary_size away).
    frequencies: fp32 [rotary_size / 2], angles from one position to the next.
    factor: what the rotated numbers are multiplied by.
    """
    half = rotary_size // 2
    if rotation == 1:
        other, step = tl.where(dims % 2 == 0, dims + 1, dims - 1), dims // 2
        sign = tl.where(dims % 2 == 0, -1.0, 1.0)
    else:
        other, step = tl.where(dims < half, dims + half, dims - half), dims % half
        sign = tl.where(dims < half, -1.0, 1.0)
    is_rotated = dims < rotary_size
    angle = position.to(tl.float32) * tl.load(frequencies + step, is_rotated, 0.0)
    cos, sin = cos_sin(angle)
    return other, tl.where(is_rotated, cos * factor, 1.0), tl.where(is_rotated, sin * factor, 0.0) * sign, is_rotated


@triton.jit
def reach_of(position, reach, in_chunks: tl.constexpr):
    """Return how many cells tokens at positions see, their own among them: of a window, or of their chunk so far."""
    if in_chunks:
        reach = position % reach + 1
    return reach


@triton.jit
def capped(scores, cap):
    """Return cap * tanh(scores / cap), where scores are already multiplied by 2 * log2(e) / cap."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(scores))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), by a series of log(1 + small), whose digits a logarithm of the sum would lose."""
    small = tl.exp(-tl.abs(x))
    ratio = small / (2.0 + small)
    square = ratio * ratio
    series = square * (1.0 / 9 + square * (1.0 / 11 + square * (1.0 / 13 + square * (1.0 / 15))))
    series = 1.0 + square * (1.0 / 3 + square * (1.0 / 5 + square * (1.0 / 7 + series)))
    return tl.maximum(x, 0.0) + 2.0 * ratio * series
