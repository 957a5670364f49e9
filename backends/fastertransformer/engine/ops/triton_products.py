"""The products and norms of a network on an NVIDIA GPU: by kernels for few rows, and by libraries for many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .fp8 import block_of
from .kernels import elementwise, fp8_rows, gemm
from .linear import ACTIVATIONS, Linear, Norm
from .ops import Ops

# Up to this many rows, and where both sides of the matrix are this long, cuBLASLt is faster than cuBLAS: 24 to 128 rows
# take 2 to 7% less time in a layer's products of Llama 8B, Qwen3 14B and GPT 20B (H200, fp16, torch 2.11), and 144 to
# 224 rows 2 to 5% less in those of Llama 8B (H200, bf16). Elsewhere it is as fast or slower.
_LT_ROWS, _LT_WIDTH = 224, 4096
_LEAST_BLOCK = 32  # of columns with one scale, that kernels multiply at a time


class TritonProducts(Ops):
    """See Ops for what each method does."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return elementwise.normalize(x.reshape(-1, x.shape[-1]).contiguous(), norm).view(x.shape)

    def linear(
        self,
        linear: Linear,
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        residual: Tensor | None = None,
    ) -> Tensor:
        if tiling := _choose_tiling(linear, x):
            return self._by_kernel(linear, x, tiling, norm, activation, residual)
        if _rounds(linear, x):
            y = ACTIVATIONS[activation](self._rounded(linear, x, norm))
            return y if residual is None else elementwise.add(residual, y)
        with _faster_library(x, linear.weight):
            return super().linear(linear, x, norm, activation, residual)

    def gated_linear(
        self,
        linear: Linear,
        gate: Linear,
        x: Tensor,
        norm: Norm | None = None,
        activation: str = "",
        then: Linear | None = None,
    ) -> Tensor:
        if x.dtype == torch.float32:
            return super().gated_linear(linear, gate, x, norm, activation)
        if norm and not norm.is_rms:
            x, norm = self.norm(x, norm), None
        is_alike = gate.has_kernels and gate.blocks == linear.blocks and gate.weight.dtype == linear.weight.dtype
        if is_alike and (tiling := _choose_tiling(linear, x, matrices=2)):
            return self._by_kernel(linear, x, tiling, norm, activation, gate=gate)
        if linear.joined and not _choose_tiling(linear, x):
            both = self.linear(linear.joined, x, norm)
            is_rounded = then and then.input_gate == activation and _rounds(then, x)
            return both if is_rounded else self.gate_halves(both, activation)
        x = self.norm(x, norm) if norm else x
        y = self.linear(linear, x)
        elementwise.multiply_activated(y, self.linear(gate, x), activation)
        return y

    def gate_halves(self, y: Tensor, activation: str) -> Tensor:
        return elementwise.gate_halves(y, activation)

    def partial_linear(self, linear: Linear, x: Tensor) -> Tensor:
        if tiling := _choose_tiling(linear, x):
            return self._by_kernel(linear, x, tiling, dtype=torch.float32)
        return self.linear(linear, x)

    def linear_fp32(self, linear: Linear, x: Tensor, norm: Norm | None = None, out: Tensor | None = None) -> Tensor:
        if tiling := _choose_tiling(linear, x):
            return self._by_kernel(linear, x, tiling, norm, dtype=torch.float32, out=out)
        return super().linear_fp32(linear, x, norm, out)

    def _by_kernel(
        self,
        linear: Linear,
        x: Tensor,
        tiling: gemm.Tiling,
        norm: Norm | None = None,
        activation: str = "",
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
        gate: Linear | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        outputs = len(linear.weight)
        y = out if residual is None else residual
        if y is None:
            y = torch.empty(*x.shape[:-1], outputs, dtype=dtype or x.dtype, device=x.device)
        flat, to = x.reshape(-1, x.shape[-1]).contiguous(), y.view(-1, outputs)
        folded = None
        if norm and len(flat) == 1:  # computed once: the warm-up is the first to need it
            if norm.weight not in linear.folded:
                linear.folded[norm.weight] = gemm.fold(linear.weight, linear.bias, linear.scales, norm, linear.blocks)
            folded = linear.folded[norm.weight]
        added, bias, other = None if residual is None else to, linear.bias, None
        if gate:
            has_bias = linear.bias is not None or gate.bias is not None
            bias, gate_bias = (each.bias_or_zeros(x) if has_bias else None for each in (linear, gate))
            other = gemm.Gate(gate.weight, gate_bias, gate.scales)
        gemm.multiply(
            flat,
            linear.weight,
            bias,
            linear.scales,
            norm,
            activation,
            added,
            to,
            folded,
            tiling,
            other,
            linear.blocks,
        )
        return y

    def _rounded(self, linear: Linear, x: Tensor, norm: Norm | None) -> Tensor:
        """Compute norm(x) @ weight.T + bias, with x rounded to FP8, see fp8_rows; x may be halves to gate."""
        assert linear.scales is not None, "it is FP8"
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        is_halves = flat.shape[1] == 2 * linear.weight.shape[1]
        codes, units = fp8_rows.round_rows(flat, norm, linear.blocks, linear.input_gate if is_halves else None)
        if linear.blocks:
            assert linear.scales_by_block is not None, "it rounds"
            y = fp8_rows.multiply_blocks(codes, units, linear.weight, linear.scales_by_block, x.dtype)
        else:
            scales = linear.scales.T
            how: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True}  # sums of 14 bits or so
            y = torch._scaled_mm(codes, linear.weight.T, units, scales, **how).to(x.dtype)
        return (y if linear.bias is None else y.add_(linear.bias)).view(*x.shape[:-1], len(linear.weight))

    def _matrix(self, linear: Linear, dtype: torch.dtype) -> Tensor:
        if linear.scales is None:
            return linear.weight
        return elementwise.dequantize(linear.weight, linear.scales, dtype, linear.blocks)


def _rounds(linear: Linear, x: Tensor) -> bool:
    """Return whether a product rounds x, [..., any], to FP8."""
    return linear.rounds and x.dtype != torch.float32 and x.numel() // x.shape[-1] > gemm.SMALL_M


def _choose_tiling(linear: Linear, x: Tensor, matrices: int = 1) -> gemm.Tiling | None:
    """Choose the tiles of a product with one or two matrices; None: others multiply them."""
    if x.dtype == torch.float32 or not linear.has_kernels:
        return None
    outputs, inputs = linear.weight.shape
    rows = x.numel() // x.shape[-1]
    if (linear.rounds and rows > gemm.SMALL_M) or (linear.blocks and block_of(linear.blocks) < _LEAST_BLOCK):
        return None
    has_words = gemm.multiplies_words(x, linear.weight, linear.blocks)
    has_digits = not linear.blocks and gemm.multiplies_digits(x, linear.weight, None)
    return gemm.choose(rows, matrices * outputs, inputs, linear.weight.dtype, has_words, has_digits)


@contextmanager
def _faster_library(x: Tensor, matrix: Tensor) -> Iterator[None]:
    """Have torch multiply x, [..., in], by a matrix, [out, in], by the faster one of its two libraries."""
    is_light = x.is_cuda and x.numel() // x.shape[-1] <= _LT_ROWS and min(matrix.shape) >= _LT_WIDTH
    if not is_light:
        yield
        return
    usual = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(usual)
