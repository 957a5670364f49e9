"""A matrix of int8 times one row of 16-bit numbers: as one_row.py does it, with x in digits; see digits.py."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .elements import activated
from .int8_split import GROUP, digits_of, sums_of_groups


@triton.jit
def _taken(
    sums, ones, squares, tile, gains, x, k, inputs, norm: tl.constexpr, is_native: tl.constexpr
):  # fmt: skip
    """Add a tile's part to the sums of products, of x, and of its squares."""
    first = tl.load(x + k, k < inputs, 0).to(tl.float32)
    second = tl.load(x + k + 8, k < inputs, 0).to(tl.float32)
    if norm == "layer":
        ones += tl.sum(first, 1) + tl.sum(second, 1)
    if norm != "":
        squares += tl.sum(first * first, 1) + tl.sum(second * second, 1)
        first, second = first * gains[0].to(tl.float32), second * gains[1].to(tl.float32)
    low, high, unit = digits_of(first, second, is_native)
    if norm == "":  # what is no finite number has no digits; the squares tell of it
        unit += tl.sum(first * 0.0, 1) + tl.sum(second * 0.0, 1)
    return sums + sums_of_groups(tile, low, high, is_native) * unit[None, :], ones, squares


@triton.jit
def _gains(gain, k, inputs, norm: tl.constexpr):
    gains = (0, 0)
    if norm != "":
        gains = (tl.load(gain + k, k < inputs, 0), tl.load(gain + k + 8, k < inputs, 0))
    return gains


@triton.jit
def one_row_int8(
    y, x, weight, scales, bias, gain, gain_sums, residual, outputs, inputs, eps,
    has_bias: tl.constexpr, norm: tl.constexpr, activation: tl.constexpr, has_residual: tl.constexpr,
    is_native: tl.constexpr, is_chained: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    ahead: tl.constexpr, is_whole: tl.constexpr,
):  # fmt: skip
    """Compute what one_row computes; inputs is a multiple of 16."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    is_n = n < outputs
    word = tl.arange(0, block_k // 4)[None, :]
    k = tl.arange(0, block_k // GROUP)[:, None] * GROUP + tl.arange(0, 8)[None, :]
    places = weight.to(tl.pointer_type(tl.int32), bitcast=True)
    places += tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * (inputs // 4)
    tiles, gains = (), ()
    for step in tl.static_range(ahead):
        here = step * (block_k // 4) + word
        tiles += (tl.load(places + here, here < inputs // 4, 0, eviction_policy="evict_first"),)  # type: ignore[assignment]
    for step in tl.static_range(ahead):
        gains += (_gains(gain, step * block_k + k, inputs, norm),)  # type: ignore[assignment]
    factors = tl.load(scales + n, is_n, 0).to(tl.float32)
    shift = tl.load(bias + n, is_n, 0).to(tl.float32) if has_bias else 0.0
    gain_sum = tl.load(gain_sums + n, is_n, 0) if norm == "layer" else 0.0
    if is_chained:
        gdc_launch_dependents()  # what the next kernel needs may be asked for too
        gdc_wait()
    before = tl.load(residual + n, is_n, 0).to(tl.float32) if has_residual else 0.0
    sums = tl.zeros([block_n, block_k // GROUP], tl.float32)
    ones = tl.zeros([block_k // GROUP], tl.float32)
    squares = ones
    for step in tl.static_range(ahead):
        sums, ones, squares = _taken(
            sums, ones, squares, tiles[step], gains[step], x, step * block_k + k, inputs, norm, is_native
        )
    if not is_whole:
        for start in range(ahead * block_k, inputs, block_k):
            here = start // 4 + word
            tile = tl.load(places + here, here < inputs // 4, 0, eviction_policy="evict_first")
            some = _gains(gain, start + k, inputs, norm)
            sums, ones, squares = _taken(sums, ones, squares, tile, some, x, start + k, inputs, norm, is_native)
    total = tl.sum(sums, 1)
    if norm != "":
        mean = tl.sum(ones, 0) / inputs
        variance = tl.maximum(tl.sum(squares, 0) / inputs - mean * mean, 0.0)
        total = (total - mean * gain_sum) * tl.rsqrt(variance + eps)
    tl.store(y + n, (before + activated(total * factors + shift, activation)).to(y.dtype.element_ty), is_n)
