"""The experts of a few tokens: each pair of token and expert is a matrix times one row, as in gemv.

Pairs need not be sorted, and the sum over a token's experts is a part of the second product. A matrix is read once for
each pair: that is what must be read where few pairs share an expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..experts import Experts
from ..linear import Norm
from .elements import activated, combined, converted
from .fp4_tiles import fp4_row_times
from .launch import uses_pdl

_SHARE = 4  # experts for each pair from which on two pairs seldom have the same
_INTO, _OUT = (8, 512, 4), (4, 1024, 4)  # outputs and inputs of a tile, warps
_PACKED_INTO, _PACKED_OUT = (8, 1024, 4), (8, 1024, 4)  # of MXFP4; not measured yet


def is_few(layer: Experts, rows: int, used: int) -> bool:
    """Return whether these rows have so few pairs that most have an expert of their own."""
    return rows == 1 or rows * used * _SHARE <= layer.into.count


@triton.jit
def _row_times(
    weight, scales, row, x, gain, inputs, is_packed: tl.constexpr, has_norm: tl.constexpr, steps: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, is_native: tl.constexpr,
):  # fmt: skip
    """Multiply some rows of a matrix by x [inputs], times a norm's weight; is_packed: matrix and scales are MXFP4.

    Returns the products, fp32 [block_n], and the sum of x's squares.
    """
    if is_packed:
        at, powers_at = weight + row * (inputs // 2), scales + row * (inputs // 32)
        return fp4_row_times(at, powers_at, x, gain, inputs, has_norm, steps, block_n, block_k, is_native)
    else:
        return _plain_row_times(weight + row * inputs, x, gain, inputs, has_norm, steps, block_n, block_k, is_native)


@triton.jit
def _plain_row_times(
    at, x, gain, inputs, has_norm: tl.constexpr, steps: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr,
    is_native: tl.constexpr,
):  # fmt: skip
    """See _row_times; ``at`` points to the first numbers of the rows."""
    sums = tl.zeros([block_n, block_k], tl.float32)
    squares = tl.zeros([block_k], tl.float32)
    for step in tl.static_range(steps):  # whose loads all begin before the first sum
        k = step * block_k + tl.arange(0, block_k)
        tile = tl.load(at[:, None] + k[None, :], (k < inputs)[None, :], 0, eviction_policy="evict_first")
        v = tl.load(x + k, k < inputs, 0).to(tl.float32)
        if has_norm:
            squares += v * v
            v *= tl.load(gain + k, k < inputs, 0).to(tl.float32)
        sums += converted(tile, tl.float32, is_native) * v[None, :]
    return tl.sum(sums, 1), tl.sum(squares, 0)


@triton.jit
def _into(
    y, x, gain, weight, scales, bias, chosen, outputs, inputs, used, eps, factor, offset, limit,
    is_packed: tl.constexpr, has_norm: tl.constexpr, is_gated: tl.constexpr, has_bias: tl.constexpr,
    activation: tl.constexpr, is_clamped: tl.constexpr, steps: tl.constexpr, block_n: tl.constexpr,
    block_k: tl.constexpr, uses_pdl: tl.constexpr, is_native: tl.constexpr,
):  # fmt: skip
    """Multiply each pair's row by its expert's matrix, and activate: x [N, inputs] -> y [pairs, outputs].

    With a norm, x is divided by its root mean square and multiplied by ``gain`` first.
    """
    if uses_pdl:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(1)
    expert = tl.load(chosen + pair)
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    is_n = n < outputs
    matrix_rows = outputs * 2 if is_gated else outputs
    row = expert * matrix_rows + tl.minimum(n, outputs - 1)  # int64, as chosen is
    token = x + (pair // used).to(tl.int64) * inputs
    first, squares = _row_times(
        weight, scales, row, token, gain, inputs, is_packed, has_norm, steps, block_n, block_k, is_native
    )
    scale = tl.rsqrt(squares / inputs + eps) if has_norm else 1.0
    first *= scale
    if has_bias:
        first += tl.load(bias + row).to(tl.float32)
    if is_gated:
        second, _ = _row_times(
            weight, scales, row + outputs, token, gain, inputs, is_packed, has_norm, steps, block_n, block_k, is_native
        )
        second *= scale
        if has_bias:
            second += tl.load(bias + row + outputs).to(tl.float32)
        result = combined(first, second, activation, is_clamped, factor, offset, limit)
    else:
        result = activated(first, activation)
    tl.store(y + pair.to(tl.int64) * outputs + n, result.to(y.dtype.element_ty), is_n)


@triton.jit
def _out(
    y, x, weight, scales, bias, chosen, counts, residual, outputs, inputs,
    is_packed: tl.constexpr, used: tl.constexpr, has_bias: tl.constexpr, has_residual: tl.constexpr,
    steps: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, uses_pdl: tl.constexpr, is_native: tl.constexpr,
):  # fmt: skip
    """Sum over a token's pairs what each counts * its expert's matrix @ x [pairs, inputs] -> y [N, outputs].

    With a residual, [N, outputs], that is added; it may be y.
    """
    if uses_pdl:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    is_n = n < outputs
    if has_residual:
        total = tl.load(residual + token * outputs + n, is_n, 0).to(tl.float32)
    else:
        total = tl.zeros([block_n], tl.float32)
    for place in tl.static_range(used):
        pair = token * used + place
        row = tl.load(chosen + pair) * outputs + tl.minimum(n, outputs - 1)
        result, _ = _row_times(
            weight, scales, row, x + pair * inputs, x, inputs, is_packed, False, steps, block_n, block_k, is_native
        )
        if has_bias:
            result += tl.load(bias + row).to(tl.float32)
        total += result * tl.load(counts + pair)
    tl.store(y + token * outputs + n, total.to(y.dtype.element_ty), is_n)


def run_experts(
    layer: Experts,
    x: Tensor,
    chosen: Tensor,
    counts: Tensor,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Sum what each token's experts compute of it, after a norm by root mean square; see Ops.run_experts."""
    into, out = layer.into.weight, layer.out.weight
    assert into is not None and out is not None
    (rows, used), hidden, inter, clamped = chosen.shape, out.shape[1], layer.out.inputs, layer.clamped
    inner = torch.empty(rows * used, inter, dtype=x.dtype, device=x.device)
    y = torch.empty(rows, hidden, dtype=x.dtype, device=x.device) if residual is None else residual
    gate = (clamped.factor, clamped.up_offset, clamped.limit or float("inf")) if clamped else (1.0, 0.0, 0.0)
    has_pdl = uses_pdl(x.device)
    flags = {"uses_pdl": has_pdl, "is_native": x.device.type == "cuda", "launch_pdl": has_pdl}
    is_packed = layer.into.is_packed
    block_n, block_k, warps = _PACKED_INTO if is_packed else _INTO
    steps = triton.cdiv(layer.into.inputs, block_k)
    _into[(triton.cdiv(inter, block_n), rows * used)](
        inner, x.contiguous(), norm and norm.weight, into, layer.into.scales, layer.into.bias, chosen, inter,
        layer.into.inputs, used, norm.eps if norm else 0.0, *gate, is_packed=is_packed, has_norm=norm is not None,
        is_gated=layer.is_gated, has_bias=layer.into.bias is not None, activation=layer.activation,
        is_clamped=clamped is not None, steps=steps, block_n=block_n, block_k=block_k, num_warps=warps, **flags,
    )  # fmt: skip
    block_n, block_k, warps = _PACKED_OUT if is_packed else _OUT
    steps = triton.cdiv(inter, block_k)
    _out[(triton.cdiv(hidden, block_n), rows)](
        y, inner, out, layer.out.scales, layer.out.bias, chosen, counts, residual, hidden, inter, is_packed=is_packed,
        used=used, has_bias=layer.out.bias is not None, has_residual=residual is not None, steps=steps,
        block_n=block_n, block_k=block_k, num_warps=warps, **flags,
    )  # fmt: skip
    return y
