"""A matrix times one row, by plain multiplication: each program reads some rows of the matrix from end to end.

Nothing is read twice. What does not depend on x is asked for before the kernel that makes x has ended (programmatic
dependent launch): as much of the matrix as the registers hold, so that the memory is busy while one kernel makes way
for the next. A norm of x costs no pass of its own: with g its weight, b its bias, and m and d the mean and the standard
deviation of x, which are summed up along with the product,

    weight @ norm(x) = (weight @ (g * x) - m * (weight @ g)) / d + weight @ b

and what does not depend on x is known beforehand.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .elements import activated, widened


@triton.jit
def _summed(v, piece: tl.constexpr):
    """Sum up the numbers that a thread holds side by side: [..., k] -> [..., k / piece]."""
    return tl.sum(tl.reshape(v, v.shape[:-1] + (v.shape[len(v.shape) - 1] // piece, piece)), len(v.shape))


@triton.jit
def _taken(sums, ones, squares, tile, gains, x, k, inputs, norm: tl.constexpr, is_native: tl.constexpr):
    """Add a tile's part to the sums of products, of x, and of its squares."""
    piece: tl.constexpr = 128 // tile.dtype.primitive_bitwidth
    v = tl.load(x + k, k < inputs, 0).to(tl.float32)
    if norm == "layer":
        ones += _summed(v, piece)
    if norm != "":
        squares += _summed(v * v, piece)
        v *= gains.to(tl.float32)
    return sums + _summed(widened(tile, tl.float32, is_native) * v[None, :], piece), ones, squares


@triton.jit
def one_row(  # noqa: C901 (one kernel)
    y, x, weight, scales, bias, gain, gain_sums, residual, outputs, inputs, eps,
    has_scales: tl.constexpr, has_bias: tl.constexpr, norm: tl.constexpr, activation: tl.constexpr,
    has_residual: tl.constexpr, is_native: tl.constexpr, is_chained: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, ahead: tl.constexpr, is_whole: tl.constexpr,
):  # fmt: skip
    """Compute y [outputs] = residual + activation(scales * (weight [outputs, inputs] @ norm(x [inputs])) + bias).

    The bias has scales * (weight @ the norm's bias) in it; gain is the norm's weight, gain_sums is weight @ gain.
    ahead: tiles that are asked for before x is there; is_whole: whether those are all.
    """
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    is_n = n < outputs
    places = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs
    tiles, gains = (), ()
    for step in tl.static_range(ahead):
        here = step * block_k + k
        tiles += (tl.load(places + here[None, :], (here < inputs)[None, :], 0, eviction_policy="evict_first"),)  # type: ignore[assignment]
    for step in tl.static_range(ahead):
        here = step * block_k + k
        gains += (tl.load(gain + here, here < inputs, 0) if norm != "" else 0,)  # type: ignore[assignment]
    factors = tl.load(scales + n, is_n, 0).to(tl.float32) if has_scales else 1.0
    shift = tl.load(bias + n, is_n, 0).to(tl.float32) if has_bias else 0.0
    gain_sum = tl.load(gain_sums + n, is_n, 0) if norm == "layer" else 0.0
    if is_chained:
        gdc_launch_dependents()  # what the next kernel needs may be asked for too
        gdc_wait()
    before = tl.load(residual + n, is_n, 0).to(tl.float32) if has_residual else 0.0
    piece: tl.constexpr = 128 // weight.dtype.element_ty.primitive_bitwidth
    sums = tl.zeros([block_n, block_k // piece], tl.float32)
    ones = tl.zeros([block_k // piece], tl.float32)
    squares = ones
    for step in tl.static_range(ahead):
        here = step * block_k + k
        sums, ones, squares = _taken(
            sums, ones, squares, tiles[step], gains[step], x, here, inputs, norm, is_native
        )  # fmt: skip
    if not is_whole:
        for start in range(ahead * block_k, inputs, block_k):
            here = start + k
            tile = tl.load(places + here[None, :], (here < inputs)[None, :], 0, eviction_policy="evict_first")
            some = tl.load(gain + here, here < inputs, 0) if norm != "" else 0
            sums, ones, squares = _taken(sums, ones, squares, tile, some, x, here, inputs, norm, is_native)
    total = tl.sum(sums, 1)
    if norm != "":
        mean = tl.sum(ones, 0) / inputs
        variance = tl.maximum(tl.sum(squares, 0) / inputs - mean * mean, 0.0)
        total = (total - mean * gain_sum) * tl.rsqrt(variance + eps)
    tl.store(y + n, (before + activated(total * factors + shift, activation)).to(y.dtype.element_ty), is_n)
