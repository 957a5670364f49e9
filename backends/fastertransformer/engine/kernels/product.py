"""Products of a matrix with few rows on a GPU: which kernel, in which tiles, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ..linear import Norming
from .few_rows import few_rows
from .norm_rows import norm_rows
from .one_row import one_row

_PARTS_BYTES = 64 << 20
_MOST_TILES = 1 << 16
_MOST_NORM_BLOCK = 8192


@dataclass(frozen=True)
class Tiling:
    """How a matrix is cut.

    Attributes:
        block_n, block_k: rows and columns of a tile.
        warps: that work on one.
        ahead: tiles of each program that are asked for before its input is there.
        stages: tiles on their way at a time.
        unroll: tiles that a turn of the loop works on, for one row.
        splits: programs that share a row's columns, on the tensor cores.
    """

    block_n: int
    block_k: int
    warps: int
    ahead: int = 0
    stages: int = 1
    unroll: int = 1
    splits: int = 1


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    norm: Norming | None = None,
    activation: str = "",
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Give residual + activation(scales * (norm(x) @ weight.T) + bias), summed in fp32 and rounded once.

    A kernel may begin before the one before it has ended, and waits by itself before it reads anything but the weight
    (programmatic dependent launch, from compute capability 9.0 on).

    Args:
        x: [rows, in], contiguous; 1 to 64 rows.
        weight: [out, in], contiguous; fp32, fp16, bf16, or int8 with scales.
        bias: [out].
        scales: [out].
        norm: of x.
        activation: gelu (by tanh), relu, silu or nothing.
        residual: [rows, out], contiguous; may be ``out``.
        out: [rows, out] to write to; None: a new one like x.
        tiling: None: by shape.
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    y = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if out is None else out
    tiling = tiling or choose(rows, outputs, inputs, weight.dtype)
    assert tiling, f"a product with {rows} rows is torch's"
    is_native, is_chained = _abilities(x.device)
    flags: dict[str, Any] = {
        "has_scales": scales is not None,
        "has_bias": bias is not None,
        "activation": activation,
        "has_residual": residual is not None,
        "is_native": is_native,
        "is_chained": is_chained,
        "block_n": tiling.block_n,
        "block_k": tiling.block_k,
        "ahead": tiling.ahead if is_native else 0,
        "stages": tiling.stages,
        "num_warps": tiling.warps,
        "launch_pdl": is_chained,
    }
    tiles = triton.cdiv(outputs, tiling.block_n)
    if rows == 1:
        gain, shift, eps = (norm.weight, norm.bias, norm.eps) if norm else (None, None, 0.0)
        flags["norm"] = ("rms" if norm.is_rms else "layer") if norm else ""
        flags |= {"has_shift": shift is not None, "unroll": tiling.unroll, "block_norm": _norm_block(inputs)}
        one_row[(tiles,)](y, x, weight, scales, bias, gain, shift, residual, outputs, inputs, eps, **flags)
        return y
    x = _normed(x, norm) if norm else x
    parts, arrivals = _scratch(x.device)
    flags |= {"padded": max(8, triton.next_power_of_2(rows)), "splits": tiling.splits}
    assert tiling.splits * flags["padded"] * outputs <= parts.numel() and tiles <= _MOST_TILES, "too large to be split"
    few_rows[(tiles, tiling.splits)](
        y, x, weight, scales, bias, residual, parts, arrivals, rows, outputs, inputs, **flags
    )
    return y


def _normed(x: Tensor, norm: Norming) -> Tensor:
    y = torch.empty_like(x)
    _, is_chained = _abilities(x.device)
    width = x.shape[1]
    norm_rows[(len(x),)](
        y, x, norm.weight, norm.bias, width, norm.eps,
        is_rms=norm.is_rms, has_shift=norm.bias is not None, is_chained=is_chained, block=_norm_block(width),
        num_warps=8, launch_pdl=is_chained,
    )  # fmt: skip
    return y


def choose(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tiling | None:
    """Choose the tiles of a product with a matrix [outputs, inputs]; None: torch's own product is faster."""
    if rows == 1:
        return Tiling(8, 1024, 4)
    if rows > (64 if dtype == torch.int8 else 16):
        return None
    return Tiling(64, 128, 4, stages=4, splits=4)


def _norm_block(width: int) -> int:
    return min(int(triton.next_power_of_2(width)), _MOST_NORM_BLOCK)


@lru_cache
def _abilities(device: torch.device) -> tuple[bool, bool]:
    """Say whether kernels are compiled (else interpreted), and whether one may begin before another has ended."""
    if device.type != "cuda":
        return False, False
    return True, torch.cuda.get_device_capability(device) >= (9, 0)


@lru_cache
def _scratch(device: torch.device) -> tuple[Tensor, Tensor]:
    """Memory for sums of parts and counts of programs, of a device: kernels that follow each other share it."""
    parts = torch.empty(_PARTS_BYTES // 4, dtype=torch.float32, device=device)
    return parts, torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)
