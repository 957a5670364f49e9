"""What kernels do with a cache of FP8: see cache/fp8_entries.py for its bytes."""

import triton
import triton.language as tl
from torch import Tensor

from ...cache.fp8_entries import FP8_BYTES
from .elements import converted

AS_NUMBERS, PORTABLE, NATIVE = 0, 1, 2  # kinds


def fp8_kind(kv: Tensor) -> int:
    """Return how kernels read a cache: as numbers, or as FP8, with instructions of a GPU or without."""
    if kv.dtype != FP8_BYTES:
        return AS_NUMBERS
    return NATIVE if kv.is_cuda else PORTABLE


@triton.jit
def exponents_of(pages, first, block: tl.constexpr, page_tokens: tl.constexpr, size: tl.constexpr, page_stride):
    """Where the exponents of the cells from first on are in a layer's cache; see decode_attention.place_of."""
    return pages.to(tl.int64) * page_stride + page_tokens * size + (first + tl.arange(0, block)) % page_tokens


@triton.jit
def numbers_of(cells, exponents, dtype: tl.constexpr, fp8: tl.constexpr):
    """Return cells, [block, width], as numbers of a type; exponents: [block], of FP8."""
    if fp8:
        scales = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]
        if dtype == tl.bfloat16:  # a power of two: nothing is rounded
            cells = converted(cells, dtype, fp8 == 2) * scales.to(dtype)
        else:
            cells = (converted(cells, tl.float32, fp8 == 2) * scales).to(dtype)
    return cells


@triton.jit
def exponent_for(most):
    """Choose the exponents for the largest numbers, fp32; what is not finite has its own."""
    bits = (most * 0.002232142857142857).to(tl.int32, bitcast=True)  # over 448
    return tl.where(most < float("inf"), tl.maximum((bits + 0x7FFFFF) >> 23, 1), 255)


@triton.jit
def codes_for(x, exponents):
    """Round x, fp32, to E4M3 by exponents of its shape, to the nearest and of two such to the even one."""
    scaled = x * ((254 - exponents) << 23).to(tl.float32, bitcast=True)
    size = tl.minimum(tl.abs(scaled), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (size * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return (tl.where(size < 0.015625, small, normal) | tl.where(scaled < 0, 128, 0)).to(tl.uint8)


@triton.jit
def keep_cell(numbers, exponent, x, is_in):
    """Write a cell, fp32 [width], and its exponent."""
    found = exponent_for(tl.max(tl.abs(x), 0) + tl.sum(x * 0.0, 0))
    tl.store(numbers, codes_for(x, found), is_in)
    tl.store(exponent, found.to(tl.uint8))


@triton.jit
def keep_cells(numbers, exponents, x, is_in, is_cell):
    """Write cells, fp32 [n, width], and their exponents, [n]."""
    found = exponent_for(tl.max(tl.abs(x), 1) + tl.sum(x * 0.0, 1))
    tl.store(numbers, codes_for(x, found[:, None]), is_in)
    tl.store(exponents, found.to(tl.uint8), is_cell)
