"""Products of a matrix with few rows on a GPU: which kernel, in which tiles, and its launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from ..fp8 import block_of
from ..linear import Blocks, Norm
from .elementwise import normalize
from .gemv import gemv
from .int8 import split_rows
from .launch import bytes_of, has_fp8, norm_kind, scales_of, scratch_of, uses_pdl
from .small_m_gemm import small_m_gemm

SMALL_M = 16
_MOST_ROWS = {torch.int8: 512, torch.float8_e4m3fn: 128}  # by type of the weight
_MOST_DIGITS = 256  # rows of FP8's digits, where a row of the weight has one scale
# Rows and outputs of a router. Of Qwen3 30B-A3B's in bf16 the tile was the quickest of seven (H100, 2026-11-28): with
# the norm before it 17 to 64 rows take 5.0 us, by cuBLAS 7.2; 128 rows 6.2 and 7.6; 256 6.8 and 7.8; 512 lose.
_MOST_ROUTED, _ROUTED = 256, range(32, 129)
_BUSY_TILES, _LEAST_TILES = 192, 96  # keep the GPU busy


@dataclass(frozen=True)
class Tiling:
    """How a matrix is tiled.

    Attributes:
        block_n: rows of a tile.
        block_k: columns of a tile.
        warps: of a program.
        stages: tiles that are loaded at a time; of gemv, the tiles that are loaded before x is complete.
        splits: programs that share a row's columns (split-k) in small_m_gemm; 0: gemv.
        registers: the most of a thread; 0: no limit.
        rows: the most rows of x of a program, in small_m_gemm.
    """

    block_n: int
    block_k: int
    warps: int
    stages: int = 1
    splits: int = 0
    registers: int = 0
    rows: int = 64


@dataclass(frozen=True)
class Gate:
    """Another matrix of the same shape and type, whose product with the same x the result is multiplied by.

    Attributes:
        weight: [out, in].
        bias: [out]; None exactly if the first has none.
        scales: [out], likewise.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None


@dataclass(frozen=True)
class Folded:
    """The parts of a product with a norm that do not depend on x; see gemv.

    Attributes:
        gain_sums: weight @ the norm's weight, fp32 [out]; the weight with its scales where it has them by block.
        bias: bias + scales * (weight @ the norm's bias), fp32 [out], or None.
    """

    gain_sums: Tensor
    bias: Tensor | None


def fold(
    weight: Tensor, bias: Tensor | None, scales: Tensor | None, norm: Norm, blocks: Blocks | None = None
) -> Folded:
    """Compute what multiply needs of a weight and a norm."""
    gain_sums, folded = torch.empty(2, 1, len(weight), dtype=torch.float32, device=weight.device).unbind()
    multiply(norm.weight[None], weight, scales=scales if blocks else None, out=gain_sums, blocks=blocks)
    if norm.bias is not None:
        return Folded(gain_sums, multiply(norm.bias[None], weight, bias, scales, out=folded, blocks=blocks))
    return Folded(gain_sums, bias)


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    norm: Norm | None = None,
    activation: str = "",
    residual: Tensor | None = None,
    out: Tensor | None = None,
    folded: Folded | None = None,
    tiling: Tiling | None = None,
    gate: Gate | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """Return residual + activation(scales * (norm(x) @ weight.T) + bias), summed in fp32 and rounded once.

    A kernel may begin before the one before it has ended, and waits before it reads anything but the weight
    (programmatic dependent launch, from compute capability 9.0 on).

    Args:
        x: [rows, in], contiguous; as many rows as choose allows.
        weight: [out, in], contiguous; fp32, fp16, bf16, or int8 or FP8 with scales.
        bias: [out].
        scales: [out], or [out, blocks].
        norm: of x.
        activation: gelu (by tanh), exact_gelu, relu, squared_relu, silu or nothing.
        residual: [rows, out], contiguous; may be ``out``.
        out: [rows, out] to write to; None: a new one like x.
        folded: see fold; None: it is computed if it is needed.
        tiling: None: by shape.
        gate: None, or what the result is multiplied by; then there is no residual, and the norm is an RMS norm.
        blocks: of columns that have one scale each; None: a row has one.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    matrix_rows = outputs if gate is None else 2 * outputs
    is_split = multiplies_words(x, weight, blocks)
    has_digits = multiplies_digits(x, weight, blocks)
    tiling = tiling or choose(rows, matrix_rows, inputs, weight.dtype, is_split, has_digits and not blocks)
    assert tiling, f"a product with {rows} rows is torch's"
    if blocks:  # without split-k, its scales need the registers of some rows
        tile = (
            {"block_k": min(tiling.block_k, block_of(blocks))} if tiling.splits else {"block_n": min(tiling.block_n, 8)}
        )
        tiling = replace(tiling, **tile)
    is_native, has_pdl = x.device.type == "cuda", uses_pdl(x.device)  # Triton's interpreter is not native
    flags: dict[str, Any] = {
        "has_scales": scales is not None,
        "activation": activation,
        "has_residual": residual is not None,
        "is_native": is_native,
        "uses_pdl": has_pdl,
        "block_n": tiling.block_n,
        "block_k": tiling.block_k,
        "num_warps": tiling.warps,
        "launch_pdl": has_pdl,
        "is_gated": gate is not None,
    }
    if tiling.registers:
        flags["maxnreg"] = tiling.registers
    tiles = triton.cdiv(matrix_rows, tiling.block_n)
    others = (bytes_of(gate.weight), gate.scales, gate.bias) if gate else (None, None, None)
    given, weight, grouped = weight, bytes_of(weight), scales_of(scales, blocks)
    if not tiling.splits:
        gain = gain_sums = None
        if norm:
            folded = folded or fold(given, bias, scales, norm, blocks)
            gain, gain_sums = norm.weight, folded.gain_sums
            bias = bias if gate else folded.bias
        assert given.dtype == torch.int8 or not is_split or tiling.block_k == 512 * tiling.warps, "see fp8_words"
        ahead = min(tiling.stages, triton.cdiv(inputs, tiling.block_k))
        flags |= {"has_bias": bias is not None, "norm": norm_kind(norm), "is_split": is_split}
        flags |= {"ahead": ahead, "is_whole": ahead * tiling.block_k >= inputs}
        eps = norm.eps if norm else 0.0
        vectors = scales, bias, gain, gain_sums, residual, *others
        gemv[(tiles,)](y, x, weight, *vectors, outputs, inputs, eps, *grouped, **flags)
        return y
    units = None
    # Splitting few rows takes longer than converting the matrix, but for FP8 where they are normalized anyway.
    is_fp8 = given.dtype == torch.float8_e4m3fn
    if is_split := has_digits and (rows > SMALL_M or (is_fp8 and norm is not None)):
        x, units = split_rows(x, norm, given.dtype)
        weight, others = given, (gate.weight, *others[1:]) if gate else others
    elif norm:
        x = normalize(x, norm)
    padded = max(8, min(tiling.rows, triton.next_power_of_2(rows)))
    tiles *= triton.cdiv(rows, padded)
    parts, arrivals = scratch_of(x.device).get(tiles, tiling.splits * rows * matrix_rows if tiling.splits > 1 else 0)
    flags |= {"has_bias": bias is not None, "padded": padded}
    flags |= {"stages": tiling.stages, "splits": tiling.splits, "is_split": is_split}
    small_m_gemm[(tiles, tiling.splits)](
        y, x, units, weight, scales, bias, residual, *others, parts, arrivals, rows, outputs, inputs, *grouped, **flags
    )
    return y


def multiplies_words(x: Tensor, weight: Tensor, blocks: Blocks | None) -> bool:
    """Return whether words of four numbers of a matrix are multiplied at a time: see int8.py and fp8_words.py."""
    if x.dtype == torch.float32 or weight.shape[1] % 16:
        return False
    if weight.dtype == torch.float8_e4m3fn:
        is_known = has_fp8(x.device) or x.device.type != "cuda"  # Triton's interpreter knows all
        return is_known and (blocks is None or not block_of(blocks) % 64)
    return weight.dtype == torch.int8


def multiplies_digits(x: Tensor, weight: Tensor, blocks: Blocks | None) -> bool:
    """Return whether the tensor cores multiply a matrix of 8 bits as it is, by digits of more rows than one.

    Before compute capability 9.0 they need integers in another order. FP8's digits have the bits of bf16.
    """
    is_known = uses_pdl(x.device) or x.device.type != "cuda"
    has_bits = weight.dtype == torch.int8 or x.dtype == torch.bfloat16
    return is_known and has_bits and multiplies_words(x, weight, blocks)


@cache
def choose(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, has_words: bool = False, has_digits: bool = False
) -> Tiling | None:
    """Choose the tiles of a product with a matrix [outputs, inputs]; None: torch's own product is faster.

    has_words, has_digits: see multiplies_words and multiplies_digits; the latter where a row has one scale.

    By what was fastest on an H200 for the matrices of GPTs of 1.3B, 5B and 20B, at 1, 8, 64 and 225 rows, of some 30
    tilings; benchmarks/gpu/kernels.py measures them.
    """
    is_8_bits, tiles = dtype in _MOST_ROWS, triton.cdiv(rows, 64) * triton.cdiv(outputs, 128)
    if 128 < rows <= _MOST_DIGITS and has_digits and dtype == torch.float8_e4m3fn and tiles >= _LEAST_TILES:
        return Tiling(128, 128, 8, 4, 1)
    if SMALL_M < rows <= _MOST_ROUTED and outputs in _ROUTED and dtype.itemsize == 2:
        return Tiling(64, 128, 4, 4, max(1, min(8, inputs // 256)), rows=16)
    if not 1 <= rows <= _MOST_ROWS.get(dtype, SMALL_M):
        return None
    if rows > 64:
        return _many_rows_tiling(triton.cdiv(rows, 64), outputs, inputs)
    if rows > 1:
        share = (512 if is_8_bits and rows <= SMALL_M else 256) // triton.cdiv(outputs, 64)  # keeps the GPU busy
        splits = max(1, min(8, 1 << max(0, share.bit_length() - 1), inputs // 256))
        return Tiling(64, 128, 4, 4 if is_8_bits else 6, splits)
    if has_words and outputs >= 4096 and inputs <= 4096:
        # Llama 3.1 8B's matrices in FP8 and int8, 19 tilings, by time (H200, torch 2.11, Triton 3.6, 2026-11-27).
        return Tiling(16 if outputs > 4096 else 8, 2048, 4, 1, registers=128)
    return _gemv_tiling(outputs, inputs, dtype.itemsize)


def _many_rows_tiling(blocks: int, outputs: int, inputs: int) -> Tiling:
    """Choose for int8 and blocks of 64 rows: large tiles, if there are enough of them for all processors."""
    tiles = blocks * triton.cdiv(outputs, 128)
    splits = 2 if tiles < _BUSY_TILES and inputs > 8192 else 1
    if tiles * splits >= _BUSY_TILES:
        return Tiling(128, 128, 8, 3, splits)
    return Tiling(64, 128, 4, 4, 2 if tiles <= 64 else 1)


def _gemv_tiling(outputs: int, inputs: int, item_bytes: int) -> Tiling:
    """Choose for one row: a thread loads 16 bytes of each tile's row, and at most 256 before x is complete."""
    wide = Tiling(8, 4096 // item_bytes, 8, 2, registers=128)
    if item_bytes == 1:
        if inputs > 16384:
            return wide
        if outputs < 4096:
            return Tiling(4, 2048, 4, 2, registers=128)
        return Tiling(8 if inputs > 2048 else 16, 2048, 4, 2, registers=128)
    if inputs >= 8192:
        return wide
    tiles = triton.cdiv(inputs, 2048 // item_bytes)
    return Tiling(4 if tiles <= 4 else 2, 2048 // item_bytes, 4, tiles, registers=128)
