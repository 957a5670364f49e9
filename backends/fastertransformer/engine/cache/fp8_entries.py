"""Keys and values as FP8 (E4M3): a byte a number, and one more for the scale that a token's numbers of a head share.

The scale is a power of two, and its byte the exponent as fp32 has it: the least that brings the largest number within
E4M3's range. So there is nothing to calibrate or to read from a checkpoint, large keys (of biases, say) are not cut
off, and what a page holds does not depend on what came before it: it can be shared, copied and made again. A power of
two costs no precision, for E4M3's numbers have exponents of their own. 255 marks numbers that are not finite.

A token's entry is its numbers and then the exponent; where a cache is head-major, the exponents of a head's page lie
together behind its numbers, so that these begin at multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .sizing import CacheShape, Entry

FP8_BYTES = torch.uint8
"""The type of a cache whose entries are such bytes."""
_LARGEST = 448.0
_NOT_FINITE = 255


def shape_of(shape: CacheShape) -> CacheShape:
    """Return the dimensions of a cache that keeps as FP8 what another keeps as numbers."""
    layers, beside = (
        tuple(Entry(heads, size + 1, parts) for heads, size, parts in kept) for kept in (shape.layers, shape.beside)
    )
    return replace(shape, layers=layers, dtype=FP8_BYTES, beside=beside)


def pack(x: Tensor) -> Tensor:
    """Round numbers, [..., D], to bytes, uint8 [..., D + 1]."""
    numbers = x.float()
    most = numbers.abs().amax(-1, keepdim=True)
    exponents = ((most / _LARGEST).view(torch.int32) + 0x7FFFFF) >> 23  # of the power of two that is not less
    exponents = torch.where(most.isfinite(), exponents.clamp_(min=1), _NOT_FINITE)
    codes = (numbers / _scales(exponents)).to(torch.float8_e4m3fn).view(FP8_BYTES)
    return torch.cat((codes, exponents.to(FP8_BYTES)), -1)


def unpack(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a cache keeps, [..., D + 1], as numbers of a type, [..., D]; what are no bytes, as they are."""
    if kept.dtype != FP8_BYTES:
        return kept
    numbers = kept[..., :-1].contiguous().view(torch.float8_e4m3fn).float()
    return numbers.mul_(_scales(kept[..., -1:].int())).to(dtype)


def flatten(pages: Tensor) -> Tensor:
    """Lay entries, [..., PAGE, D + 1], as a head-major cache has them."""
    return torch.cat((pages[..., :-1].flatten(-2), pages[..., -1]), -1).view(pages.shape)


def restore_entries(pages: Tensor) -> Tensor:
    """Lay entries of a head-major cache, [..., PAGE, D + 1], each by itself again; what are no bytes, as they are."""
    if pages.dtype != FP8_BYTES:
        return pages
    tokens, width = pages.shape[-2:]
    numbers, exponents = torch.split(pages.flatten(-2), [tokens * (width - 1), tokens], -1)
    return torch.cat((numbers.reshape(*pages.shape[:-1], width - 1), exponents[..., None]), -1)


def _scales(exponents: Tensor) -> Tensor:
    return (exponents << 23).view(torch.float32)
