"""Products of a matrix with few rows on a GPU: which kernel, in which tiles, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ...model.linear import Norm
from .dequantize import widen as widen
from .gemv import one_row
from .gemv_int8 import one_row_int8
from .int8_rows import digit_rows
from .norm import norm_rows
from .small_m_gemm import few_rows

_MOST_ROWS, _MOST_ROWS_INT8 = 16, 512
_PARTS_BYTES = 16 << 20
_MOST_TILES = 1 << 16
_MOST_NORM_BLOCK = 8192
_BUSY_TILES = 192  # keep the GPU busy


@dataclass(frozen=True)
class Tiling:
    """How a matrix is cut.

    Attributes:
        block_n: rows of a tile.
        block_k: columns.
        warps: that work on one.
        stages: tiles on their way at a time; of one row, those that a program asks for before x is there.
        splits: programs that share a row's columns, on the tensor cores; 0: plain multiplication, of one row.
        registers: of a thread at most; 0: as many as it likes.
        rows: of x that a program multiplies at most, on the tensor cores.
    """

    block_n: int
    block_k: int
    warps: int
    stages: int = 1
    splits: int = 0
    registers: int = 0
    rows: int = 64


@dataclass(frozen=True)
class Folded:
    """What a product of a normed row has that does not depend on the row; see one_row.

    Attributes:
        gain_sums: weight @ the norm's weight, fp32 [out].
        bias: bias + scales * (weight @ the norm's bias), fp32 [out], or None.
    """

    gain_sums: Tensor
    bias: Tensor | None


def fold(weight: Tensor, bias: Tensor | None, scales: Tensor | None, norm: Norm) -> Folded:
    """Compute it."""
    gain_sums, folded = torch.empty(2, 1, len(weight), dtype=torch.float32, device=weight.device).unbind()
    multiply(norm.weight[None], weight, out=gain_sums)
    if norm.bias is not None:
        return Folded(gain_sums, multiply(norm.bias[None], weight, bias, scales, out=folded))
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
) -> Tensor:
    """Give residual + activation(scales * (norm(x) @ weight.T) + bias), summed in fp32 and rounded once.

    A kernel may begin before the one before it has ended, and waits by itself before it reads anything but the weight
    (programmatic dependent launch, from compute capability 9.0 on).

    Args:
        x: [rows, in], contiguous; as many rows as choose allows.
        weight: [out, in], contiguous; fp32, fp16, bf16, or int8 with scales.
        bias: [out].
        scales: [out].
        norm: of x.
        activation: gelu (by tanh), relu, silu or nothing.
        residual: [rows, out], contiguous; may be ``out``.
        out: [rows, out] to write to; None: a new one like x.
        folded: see fold; None: it is computed where it is needed.
        tiling: None: by shape.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    tiling = tiling or choose(rows, outputs, inputs, weight.dtype)
    assert tiling, f"a product with {rows} rows is torch's"
    is_native, is_chained = _abilities(x.device)
    flags: dict[str, Any] = {
        "has_scales": scales is not None,
        "activation": activation,
        "has_residual": residual is not None,
        "is_native": is_native,
        "is_chained": is_chained,
        "block_n": tiling.block_n,
        "block_k": tiling.block_k,
        "num_warps": tiling.warps,
        "launch_pdl": is_chained,
    }
    if tiling.registers:
        flags["maxnreg"] = tiling.registers
    tiles = triton.cdiv(outputs, tiling.block_n)
    if not tiling.splits:
        gain = gain_sums = None
        if norm:
            folded = folded or fold(weight, bias, scales, norm)
            gain, gain_sums, bias = norm.weight, folded.gain_sums, folded.bias
        ahead = min(tiling.stages, triton.cdiv(inputs, tiling.block_k))
        flags |= {"has_bias": bias is not None, "norm": ("rms" if norm.is_rms else "layer") if norm else ""}
        flags |= {"ahead": ahead, "is_whole": ahead * tiling.block_k >= inputs}
        kernel = one_row
        if _has_digits(x, scales):
            kernel = one_row_int8
            del flags["has_scales"]
        eps = norm.eps if norm else 0.0
        kernel[(tiles,)](y, x, weight, scales, bias, gain, gain_sums, residual, outputs, inputs, eps, **flags)
        return y
    units = None
    # A few rows take longer to be put into digits than the matrix to be widened, and tensor cores before compute
    # capability 9.0 want integers in another order.
    if has_digits := _has_digits(x, scales) and rows > _MOST_ROWS and (is_chained or not is_native):
        x, units = _digits(x, norm)
    elif norm:
        x = normed(x, norm)
    parts, arrivals = _scratch(x.device)
    padded = max(8, min(tiling.rows, triton.next_power_of_2(rows)))
    tiles *= triton.cdiv(rows, padded)
    flags |= {"has_bias": bias is not None, "padded": padded}
    flags |= {"stages": tiling.stages, "splits": tiling.splits, "has_digits": has_digits}
    is_in = tiling.splits == 1 or tiling.splits * rows * outputs <= parts.numel()
    assert is_in and tiles <= _MOST_TILES, "too large to be split"
    few_rows[(tiles, tiling.splits)](
        y, x, units, weight, scales, bias, residual, parts, arrivals, rows, outputs, inputs, **flags
    )
    return y


def _has_digits(x: Tensor, scales: Tensor | None) -> bool:
    """Say whether a product with int8 is one of integers; see digits.py."""
    return scales is not None and x.dtype != torch.float32 and not x.shape[1] % 16


def _digits(x: Tensor, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Give norm(x) as digit_rows does, int8 [2, rows, inputs] and fp32 [rows]."""
    rows, width = x.shape
    digits = torch.empty(2, rows, width, dtype=torch.int8, device=x.device)
    units = torch.empty(rows, dtype=torch.float32, device=x.device)
    gain, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
    _, is_chained = _abilities(x.device)
    digit_rows[(rows,)](
        digits, units, x, gain, shift, width, eps,
        norm=("rms" if norm.is_rms else "layer") if norm else "", has_shift=shift is not None, is_chained=is_chained,
        block=_norm_block(width), num_warps=8, launch_pdl=is_chained,
    )  # fmt: skip
    return digits, units


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Norm each row of x, [rows, width], contiguous."""
    y = torch.empty_like(x)
    _, is_chained = _abilities(x.device)
    width = x.shape[1]
    norm_rows[(len(x),)](
        y, x, norm.weight, norm.bias, width, norm.eps,
        is_rms=norm.is_rms, has_shift=norm.bias is not None, is_chained=is_chained, block=_norm_block(width),
        num_warps=8, launch_pdl=is_chained,
    )  # fmt: skip
    return y


@cache
def choose(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tiling | None:
    """Choose the tiles of a product with a matrix [outputs, inputs]; None: torch's own product is faster.

    By what was fastest on an H200 for the matrices of GPTs of 1.3B, 5B and 20B, at 1, 8, 64 and 225 rows, of some 30
    tilings; benchmarks/gpu_kernels.py measures them.
    """
    is_int8 = dtype == torch.int8
    if not 1 <= rows <= (_MOST_ROWS_INT8 if is_int8 else _MOST_ROWS):
        return None
    if rows > 64:
        return _many_rows_tiling(triton.cdiv(rows, 64), outputs, inputs)
    if rows > 1:
        share = (512 if is_int8 and rows <= _MOST_ROWS else 256) // triton.cdiv(outputs, 64)  # keeps the GPU busy
        splits = max(1, min(8, 1 << max(0, share.bit_length() - 1), inputs // 256))
        return Tiling(64, 128, 4, 4 if is_int8 else 6, splits)
    return _one_row_tiling(outputs, inputs, dtype.itemsize)


def _many_rows_tiling(blocks: int, outputs: int, inputs: int) -> Tiling:
    """Choose for int8 and so many blocks of 64 rows: large tiles, where there are enough of them for all processors."""
    tiles = blocks * triton.cdiv(outputs, 128)
    splits = 2 if tiles < _BUSY_TILES and inputs > 8192 else 1
    if tiles * splits >= _BUSY_TILES:
        return Tiling(128, 128, 8, 3, splits)
    return Tiling(64, 128, 4, 4, 2 if tiles <= 64 else 1)


def _one_row_tiling(outputs: int, inputs: int, item_bytes: int) -> Tiling:
    """Choose for one row: a thread asks for 16 bytes of each tile's row, and for at most 256 before x is there."""
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


def _norm_block(width: int) -> int:
    return min(int(triton.next_power_of_2(width)), _MOST_NORM_BLOCK)


@lru_cache
def _abilities(device: torch.device) -> tuple[bool, bool]:
    """Say whether kernels are compiled (else interpreted), and whether one may begin before another has ended."""
    if device.type != "cuda":
        return False, False
    return True, torch.cuda.get_device_capability(device) >= (9, 0)


def _scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for sums of parts and counts of programs, of the stream in use: its kernels follow each other."""
    return _scratch_of(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@lru_cache
def _scratch_of(device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    parts = torch.empty(_PARTS_BYTES // 4, dtype=torch.float32, device=device)
    return parts, torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
