"""Embedding of a step's tokens, norms, dequantized weights, and gated activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..linear import Blocks, Norm
from .elements import activated, converted, moments
from .launch import bytes_of, norm_block, scales_of, uses_pdl

_BLOCK, _DEQUANTIZE_N, _DEQUANTIZE_K = 1024, 8, 1024


@triton.jit(do_not_specialize=("last",))
def _embed(
    out, ids, positions, tokens, places, width, last,
    has_places: tl.constexpr, block: tl.constexpr, uses_pdl: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    if uses_pdl:
        # In this order: later kernels may then read results of the step before without waiting for it.
        gdc_wait()
        gdc_launch_dependents()
    is_in = at < width
    numbers = tl.load(tokens + tl.load(ids + row) * width + at, is_in)
    if has_places:
        place = tl.minimum(tl.load(positions + row), last)
        numbers += tl.load(places + place * width + at, is_in)
    tl.store(out + row.to(tl.int64) * width + at, numbers, is_in)


def embed(ids: Tensor, positions: Tensor, tokens: Tensor, places: Tensor | None) -> Tensor:
    """Look up tokens and positions and add them, as Ops.embed says; both tables have the type of the result."""
    width = tokens.shape[1]
    ids, positions = ids.contiguous(), positions.contiguous()
    out = torch.empty(len(ids), width, dtype=tokens.dtype, device=tokens.device)
    has_pdl = uses_pdl(tokens.device)
    _embed[(len(ids), triton.cdiv(width, _BLOCK))](
        out, ids, positions, tokens, places, width, 0 if places is None else len(places) - 1,
        has_places=places is not None, block=_BLOCK, uses_pdl=has_pdl, num_warps=4, launch_pdl=has_pdl,
    )  # fmt: skip
    return out


@triton.jit
def _norm_rows(
    y, x, gain, shift, inputs, eps,
    is_rms: tl.constexpr, has_shift: tl.constexpr, uses_pdl: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Compute y [rows, inputs] = norm(x [rows, inputs]) along inputs: a program a row."""
    if uses_pdl:
        gdc_wait()
        gdc_launch_dependents()
    x += tl.program_id(0) * inputs
    y += tl.program_id(0) * inputs
    mean, scale = moments(x, inputs, eps, is_rms, block)
    for start in range(0, inputs, block):
        k = start + tl.arange(0, block)
        v = (
            (tl.load(x + k, k < inputs, 0).to(tl.float32) - mean)
            * scale
            * tl.load(gain + k, k < inputs, 0).to(tl.float32)
        )
        if has_shift:
            v += tl.load(shift + k, k < inputs, 0).to(tl.float32)
        tl.store(y + k, v.to(y.dtype.element_ty), k < inputs)


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Normalize each row of x, [rows, width], contiguous."""
    y, has_pdl, width = torch.empty_like(x), uses_pdl(x.device), x.shape[1]
    _norm_rows[(len(x),)](
        y, x, norm.weight, norm.bias, width, norm.eps,
        is_rms=norm.is_rms, has_shift=norm.bias is not None, uses_pdl=has_pdl, block=norm_block(width),
        num_warps=8, launch_pdl=has_pdl,
    )  # fmt: skip
    return y


@triton.jit
def _dequantize(
    out, weight, scales, outputs, inputs, scale_first, scale_count, scale_width: tl.constexpr,
    block_n: tl.constexpr, block_k: tl.constexpr, is_native: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    k = tl.program_id(1) * block_k + tl.arange(0, block_k)
    at = n[:, None].to(tl.int64) * inputs + k[None, :]
    is_in = (n < outputs)[:, None] & (k < inputs)[None, :]
    tile = converted(tl.load(weight + at, is_in, 0.0), tl.float32, is_native)
    if scale_width:
        scale = tl.load(scales + n[:, None] * scale_count + (scale_first + k[None, :]) // scale_width, is_in, 0)
    else:
        scale = tl.load(scales + n, n < outputs, 0).to(tl.float32)[:, None]
    tl.store(out + at, (tile * scale).to(out.dtype.element_ty), is_in)


def dequantize(weight: Tensor, scales: Tensor, dtype: torch.dtype, blocks: Blocks | None = None) -> Tensor:
    """Dequantize a weight of 8 bits, [out, in], to a type, for products that cuBLASLt makes; see linear.Linear."""
    outputs, inputs = weight.shape
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    grid = (triton.cdiv(outputs, _DEQUANTIZE_N), triton.cdiv(inputs, _DEQUANTIZE_K))
    is_native = weight.device.type == "cuda"
    tile = {"block_n": _DEQUANTIZE_N, "block_k": _DEQUANTIZE_K}
    grouped = scales_of(scales, blocks)
    _dequantize[grid](
        out, bytes_of(weight), scales, outputs, inputs, *grouped, **tile, is_native=is_native, num_warps=4
    )
    return out


@triton.jit
def _add(x, y, count, block: tl.constexpr, uses_pdl: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    if uses_pdl:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.load(x + at, at < count, 0).to(tl.float32) + tl.load(y + at, at < count, 0).to(tl.float32)
    tl.store(x + at, total.to(x.dtype.element_ty), at < count)


def add(x: Tensor, y: Tensor) -> Tensor:
    """Add y to x, contiguous both and of one shape and type; returns x."""
    count, has_pdl = x.numel(), uses_pdl(x.device)
    _add[(triton.cdiv(count, 2 * _BLOCK),)](
        x, y, count, block=2 * _BLOCK, uses_pdl=has_pdl, num_warps=8, launch_pdl=has_pdl
    )
    return x


@triton.jit
def _gate(y, gate, count, activation: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    own = tl.load(y + at, at < count, 0).to(tl.float32)
    other = tl.load(gate + at, at < count, 0).to(tl.float32)
    tl.store(y + at, (activated(own, activation) * other).to(y.dtype.element_ty), at < count)


def multiply_activated(y: Tensor, gate: Tensor, activation: str) -> None:
    """Replace y by activation(y) * gate, both contiguous and of one shape."""
    count = y.numel()
    _gate[(triton.cdiv(count, _BLOCK),)](y, gate, count, activation=activation, block=_BLOCK, num_warps=4)


@triton.jit
def _gate_halves(both, out, width, activation: tl.constexpr, block: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    own = tl.load(both + 2 * row * width + at, at < width, 0).to(tl.float32)
    other = tl.load(both + (2 * row + 1) * width + at, at < width, 0).to(tl.float32)
    tl.store(out + row * width + at, (activated(own, activation) * other).to(out.dtype.element_ty), at < width)


def gate_halves(both: Tensor, activation: str) -> Tensor:
    """Return activation(first half) * second half of the last axis, [..., 2 n] without gaps -> [..., n]."""
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    _gate_halves[(out.numel() // width, triton.cdiv(width, _BLOCK))](
        both, out, width, activation=activation, block=_BLOCK, num_warps=4
    )
    return out
