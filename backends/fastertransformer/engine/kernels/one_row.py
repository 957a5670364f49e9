"""A matrix times one row, by plain multiplication: each program reads some rows of the matrix from end to end.

Nothing is read twice. A program asks for its first tile before the kernel that makes x has ended (programmatic
dependent launch), and a norm of x costs no pass of its own: with g its weight, b its bias, and m and d the mean and the
standard deviation of x, which are summed up along with the product,

    weight @ norm(x) = (weight @ (g * x) - m * (weight @ g)) / d + weight @ b

and what does not depend on x is known beforehand.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .elements import activated, widened


@triton.jit
def _taken(sums, ones, squares, tile, x, gain, k, inputs, norm: tl.constexpr, is_native: tl.constexpr):
    """Add a tile's part to the sums of products, of x, and of its squares."""
    v = tl.load(x + k, k < inputs, 0).to(tl.float32)
    if norm == "layer":
        ones += v
    if norm != "":
        squares += v * v
        v *= tl.load(gain + k, k < inputs, 0).to(tl.float32)
    return sums + widened(tile, tl.float32, is_native) * v[None, :], ones, squares


@triton.jit
def one_row(  # noqa: C901 (one kernel)
    y, x, weight, scales, bias, gain, gain_sums, residual, outputs, inputs, eps,
    has_scales: tl.constexpr, has_bias: tl.constexpr, norm: tl.constexpr, activation: tl.constexpr,
    has_residual: tl.constexpr, is_native: tl.constexpr, is_chained: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    """Compute y [outputs] = residual + activation(scales * (weight [outputs, inputs] @ norm(x [inputs])) + bias).

    The bias has scales * (weight @ the norm's bias) in it; gain is the norm's weight, gain_sums is weight @ gain.
    """
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    places = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs
    tile = tl.load(places + k[None, :], (k < inputs)[None, :], 0, eviction_policy="evict_first")
    if is_chained:
        gdc_launch_dependents()  # the matrix of the next kernel may be asked for too
        gdc_wait()
    sums = tl.zeros([block_n, block_k], tl.float32)
    ones = tl.zeros([block_k], tl.float32)
    sums, ones, squares = _taken(sums, ones, ones, tile, x, gain, k, inputs, norm, is_native)
    for start in tl.range(block_k, inputs, block_k, num_stages=stages):
        here = start + k
        tile = tl.load(places + here[None, :], (here < inputs)[None, :], 0, eviction_policy="evict_first")
        sums, ones, squares = _taken(sums, ones, squares, tile, x, gain, here, inputs, norm, is_native)
    total = tl.sum(sums, 1)
    if norm != "":
        mean = tl.sum(ones, 0) / inputs
        variance = tl.maximum(tl.sum(squares, 0) / inputs - mean * mean, 0.0)
        if norm == "layer":
            total -= mean * tl.load(gain_sums + n, n < outputs, 0)
        total *= tl.rsqrt(variance + eps)
    if has_scales:
        total *= tl.load(scales + n, n < outputs, 0).to(tl.float32)
    if has_bias:
        total += tl.load(bias + n, n < outputs, 0).to(tl.float32)
    total = activated(total, activation)
    if has_residual:
        total += tl.load(residual + n, n < outputs, 0).to(tl.float32)
    tl.store(y + n, total.to(y.dtype.element_ty), n < outputs)
