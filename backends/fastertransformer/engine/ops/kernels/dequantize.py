"""A matrix of int8 as the numbers that it stands for, for products with so many rows that torch's are faster."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elements import widened

_BLOCK_N, _BLOCK_K = 8, 1024


@triton.jit
def _widen(out, weight, scales, outputs, inputs, block_n: tl.constexpr, block_k: tl.constexpr, is_native: tl.constexpr):
    n = tl.program_id(0) * block_n + tl.arange(0, block_n)
    k = tl.program_id(1) * block_k + tl.arange(0, block_k)
    at = n[:, None].to(tl.int64) * inputs + k[None, :]
    is_in = (n < outputs)[:, None] & (k < inputs)[None, :]
    tile = widened(tl.load(weight + at, is_in, 0), tl.float32, is_native)
    scale = tl.load(scales + n, n < outputs, 0).to(tl.float32)
    tl.store(out + at, (tile * scale[:, None]).to(out.dtype.element_ty), is_in)


def widen(weight: Tensor, scales: Tensor) -> Tensor:
    """Give weight, int8 [out, in], times scales, [out], in the scales' type."""
    outputs, inputs = weight.shape
    out = torch.empty(weight.shape, dtype=scales.dtype, device=weight.device)
    grid = (triton.cdiv(outputs, _BLOCK_N), triton.cdiv(inputs, _BLOCK_K))
    is_native = weight.device.type == "cuda"
    _widen[grid](
        out, weight, scales, outputs, inputs, block_n=_BLOCK_N, block_k=_BLOCK_K, is_native=is_native, num_warps=4
    )
    return out
