"""gemv, a matrix times one row: each program reads some rows of the matrix.

Nothing is read twice. The part of the matrix that fits into the registers is loaded before the kernel that computes x
has ended (programmatic dependent launch), so that the memory is busy between two kernels. A norm of x needs no separate
pass: with g its weight, b its bias, and m and d the mean and the standard deviation of x, which are summed up along
with the product,

    weight @ norm(x) = (weight @ (g * x) - m * (weight @ g)) / d + weight @ b

and the terms without x are computed beforehand (gemm.fold). An int8 weight may be multiplied as integers, with x split
into digits, and an FP8 weight on the tensor cores (is_split); see int8.py and fp8_words.py. The number of inputs is
then a multiple of 16.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .elements import activated, converted, gated, load_vector, rows_of
from .fp8_words import halves_of, sums_of_words
from .int8 import GROUP, digits_of, sums_of_groups


@triton.jit
def _load_tile(weight_rows, start, inputs, block_k: tl.constexpr, is_split: tl.constexpr):
    """Load a tile of the weight: its numbers, or words of four."""
    if is_split:
        width: tl.constexpr = block_k // 4
        k, end = start // 4 + tl.arange(0, width), inputs // 4
    else:
        k, end = start + tl.arange(0, block_k), inputs
    return tl.load(weight_rows + k[None, :], (k < end)[None, :], 0.0, eviction_policy="evict_first")


@triton.jit
def _half_groups(start, block_k: tl.constexpr):
    """Where the first halves of the tile's groups are in x, [groups, 8]; the second halves are 8 further."""
    groups: tl.constexpr = block_k // GROUP
    return start + tl.arange(0, groups)[:, None] * GROUP + tl.arange(0, 8)[None, :]


@triton.jit
def _load_gains(gain, start, inputs, norm: tl.constexpr, block_k: tl.constexpr, is_split: tl.constexpr):
    """Load the norm's weight of a tile's columns, in the shape that _accumulate reads x in."""
    gains = (0, 0)
    if norm != "":
        if is_split:
            k = _half_groups(start, block_k)
            gains = (tl.load(gain + k, k < inputs, 0), tl.load(gain + k + 8, k < inputs, 0))
        else:
            k = start + tl.arange(0, block_k)
            gains = (tl.load(gain + k, k < inputs, 0), 0)
    return gains


@triton.jit
def _load_factors(scale_rows, start, inputs, first, width: tl.constexpr, block_k: tl.constexpr, piece: tl.constexpr):
    """Load what the sums of a tile's pieces are multiplied by; 1 where a row has one scale, or none."""
    factors = 1.0
    if width:
        k = start + tl.arange(0, block_k // piece) * piece
        factors = tl.load(scale_rows + ((first + k) // width)[None, :], (k < inputs)[None, :], 0.0)
    return factors


@triton.jit
def _sum_pieces(v, piece: tl.constexpr):
    """Sum the numbers that a thread holds side by side: [..., k] -> [..., k / piece]."""
    return tl.sum(tl.reshape(v, v.shape[:-1] + (v.shape[len(v.shape) - 1] // piece, piece)), len(v.shape))


@triton.jit
def _accumulate(
    sums, ones, squares, tile, factors, gains, x, start, inputs,
    norm: tl.constexpr, block_k: tl.constexpr, piece: tl.constexpr, is_native: tl.constexpr, is_split: tl.constexpr,
    is_fp8: tl.constexpr,
):  # fmt: skip
    """Add a tile's part to the sums of products, of x, and of its squares."""
    if is_split:
        k = _half_groups(start, block_k)
        first = tl.load(x + k, k < inputs, 0).to(tl.float32)
        second = tl.load(x + k + 8, k < inputs, 0).to(tl.float32)
        if norm == "layer":
            ones += tl.sum(first, 1) + tl.sum(second, 1)
        if norm != "":
            squares += tl.sum(first * first, 1) + tl.sum(second * second, 1)
            first, second = first * gains[0].to(tl.float32), second * gains[1].to(tl.float32)
        if is_fp8:
            front, back, unit = halves_of(first, second, is_native)
            sums += sums_of_words(tile, front, back, is_native) * unit[None, :] * factors
        else:
            low, high, unit = digits_of(first, second, is_native)
            if norm == "":  # a number that is not finite has no digits; with a norm the squares tell of it
                unit += tl.sum(first * 0.0, 1) + tl.sum(second * 0.0, 1)
            sums += sums_of_groups(tile, low, high, is_native) * unit[None, :]
    else:
        k = start + tl.arange(0, block_k)
        v = tl.load(x + k, k < inputs, 0).to(tl.float32)
        if norm == "layer":
            ones += _sum_pieces(v, piece)
        if norm != "":
            squares += _sum_pieces(v * v, piece)
            v *= gains[0].to(tl.float32)
        sums += _sum_pieces(converted(tile, tl.float32, is_native) * v[None, :], piece) * factors
    return sums, ones, squares


@triton.jit
def gemv(  # noqa: C901 (one kernel)
    y, x, weight, scales, bias, gain, gain_sums, residual, other, other_scales, other_bias, outputs, inputs, eps,
    scale_first, scale_count, scale_width: tl.constexpr,
    has_scales: tl.constexpr, has_bias: tl.constexpr, norm: tl.constexpr, activation: tl.constexpr,
    has_residual: tl.constexpr, is_split: tl.constexpr, is_native: tl.constexpr, uses_pdl: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, ahead: tl.constexpr, is_whole: tl.constexpr,
    is_gated: tl.constexpr,
):  # fmt: skip
    """Compute y [outputs] = residual + activation(scales * (weight [outputs, inputs] @ norm(x [inputs])) + bias).

    If it is gated, y is instead activation(...) * the same of the other matrix; there is no residual.

    The bias has scales * (weight @ the norm's bias) in it; gain is the norm's weight, gain_sums is weight @ gain.
    scale_width: of blocks of columns that have a scale each, [outputs, scale_count], and are ``scale_first`` columns
    further on; 0: a row has one.
    ahead: tiles that are loaded before x is complete; is_whole: whether there are no more tiles.
    """
    n, is_other = rows_of(block_n, tl.program_id(0) * block_n, is_gated)
    is_n = n < outputs
    weight_rows = weight
    width = inputs
    if is_split:
        weight_rows = weight.to(tl.pointer_type(tl.int32), bitcast=True)
        width = inputs // 4
    row_at = tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * width
    if is_gated:
        others = other.to(tl.pointer_type(tl.int32), bitcast=True) if is_split else other
        weight_rows = tl.where(is_other[:, None], others + row_at, weight_rows + row_at)
    else:
        weight_rows += row_at
    piece: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth  # GROUP, if is_split
    is_fp8: tl.constexpr = weight.dtype.element_ty != tl.int8  # if it is split
    scale_rows = scales
    if scale_width:
        scale_at = tl.minimum(n, outputs - 1)[:, None] * scale_count
        scale_rows = scales + scale_at
        if is_gated:
            scale_rows = tl.where(is_other[:, None], other_scales + scale_at, scale_rows)
    tiles, gains, scaled = (), (), ()
    for step in tl.static_range(ahead):
        tiles += (_load_tile(weight_rows, step * block_k, inputs, block_k, is_split),)  # type: ignore[assignment]
    for step in tl.static_range(ahead):
        gains += (_load_gains(gain, step * block_k, inputs, norm, block_k, is_split),)  # type: ignore[assignment]
    for step in tl.static_range(ahead):
        scaled += (_load_factors(scale_rows, step * block_k, inputs, scale_first, scale_width, block_k, piece),)  # type: ignore[assignment]
    factors = 1.0
    if has_scales and not scale_width:
        factors = load_vector(scales, other_scales, n, is_other, is_n, is_gated)
    shift = load_vector(bias, other_bias, n, is_other, is_n, is_gated) if has_bias else 0.0
    gain_sum = tl.load(gain_sums + n, is_n, 0) if norm == "layer" else 0.0
    if uses_pdl:
        gdc_launch_dependents()  # the next kernel may load what it needs too
        gdc_wait()
    before = tl.load(residual + n, is_n, 0).to(tl.float32) if has_residual else 0.0
    sums = tl.zeros([block_n, block_k // piece], tl.float32)
    ones = tl.zeros([block_k // piece], tl.float32)
    squares = ones
    for step in tl.static_range(ahead):
        sums, ones, squares = _accumulate(
            sums, ones, squares, tiles[step], scaled[step], gains[step], x, step * block_k, inputs,
            norm, block_k, piece, is_native, is_split, is_fp8,
        )  # fmt: skip
    if not is_whole:
        for start in range(ahead * block_k, inputs, block_k):
            tile = _load_tile(weight_rows, start, inputs, block_k, is_split)
            some = _load_gains(gain, start, inputs, norm, block_k, is_split)
            others_scaled = _load_factors(scale_rows, start, inputs, scale_first, scale_width, block_k, piece)
            sums, ones, squares = _accumulate(
                sums, ones, squares, tile, others_scaled, some, x, start, inputs,
                norm, block_k, piece, is_native, is_split, is_fp8,
            )  # fmt: skip
    total = tl.sum(sums, 1)
    if norm != "":
        mean = tl.sum(ones, 0) / inputs
        variance = tl.maximum(tl.sum(squares, 0) / inputs - mean * mean, 0.0)
        total = (total - mean * gain_sum) * tl.rsqrt(variance + eps)
    if is_gated:
        pair = tl.program_id(0) * (block_n // 2) + tl.arange(0, block_n // 2)
        product = gated(total * factors + shift, activation)
        tl.store(y + pair, product.to(y.dtype.element_ty), pair < outputs)
    else:
        tl.store(y + n, (before + activated(total * factors + shift, activation)).to(y.dtype.element_ty), is_n)
