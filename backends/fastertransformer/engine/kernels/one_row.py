"""A matrix times one row, by plain multiplication: each program reads some rows of the matrix from end to end.

Nothing is read twice, and the memory is never idle: the first columns are asked for before the kernel that makes x has
ended (programmatic dependent launch).
"""

import triton
import triton.language as tl

from .elements import activated, ask, moments, wait_for_input, widened


@triton.jit
def one_row(  # noqa: C901 (one kernel)
    y, x, weight, scales, bias, gain, shift, residual, outputs, inputs, eps,
    has_scales: tl.constexpr, has_bias: tl.constexpr, norm: tl.constexpr, has_shift: tl.constexpr,
    activation: tl.constexpr, has_residual: tl.constexpr, is_native: tl.constexpr, is_chained: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, ahead: tl.constexpr, stages: tl.constexpr, unroll: tl.constexpr,
    block_norm: tl.constexpr,
):  # fmt: skip
    """Compute y [outputs] = residual + activation(scales * (weight [outputs, inputs] @ norm(x [inputs])) + bias)."""
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    k = tl.arange(0, block_k)
    places = weight + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * inputs
    if ahead > 0:
        line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        for part in tl.static_range(ahead):
            far = part * block_k + tl.arange(0, max(1, block_k // line)) * line
            ask(places + tl.minimum(far, inputs - 1)[None, :])
    if is_chained:
        wait_for_input()
    if norm != "":
        mean, scale = moments(x, inputs, eps, norm == "rms", block_norm)
    sums = tl.zeros([block_n, block_k], tl.float32)
    for start in tl.range(0, inputs, block_k, num_stages=stages, loop_unroll_factor=unroll):
        here = start + k
        is_k = here < inputs
        tile = tl.load(places + here[None, :], is_k[None, :], 0, eviction_policy="evict_first")
        v = tl.load(x + here, is_k, 0).to(tl.float32)
        if norm != "":
            v = (v - mean) * scale * tl.load(gain + here, is_k, 0).to(tl.float32)
            if has_shift:
                v += tl.load(shift + here, is_k, 0).to(tl.float32)
        sums += widened(tile, tl.float32, is_native) * v[None, :]
    total = tl.sum(sums, 1)
    if has_scales:
        total *= tl.load(scales + n, n < outputs, 0).to(tl.float32)
    if has_bias:
        total += tl.load(bias + n, n < outputs, 0).to(tl.float32)
    total = activated(total, activation)
    if has_residual:
        total += tl.load(residual + n, n < outputs, 0).to(tl.float32)
    tl.store(y + n, total.to(y.dtype.element_ty), n < outputs)
