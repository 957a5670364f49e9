"""Floating-point numbers of 8 and 4 bits, by the names that safetensors has for them, and their values.

Formats: "FP8 Formats for Deep Learning" (arXiv 2209.05433) and "OCP Microscaling Formats (MX) Specification" 1.0.
"""

from __future__ import annotations

import numpy as np

from export_scripts.tensors.dtypes import Array
from handover.errors import CheckpointError

E4M3, E5M2, E8M0, FP4 = "F8_E4M3", "F8_E5M2", "F8_E8M0", "FP4"
"""FP4 are pairs of E2M1 in a byte, the first in its low half."""
BYTE = "U8"
"""How safetensors calls bytes whose meaning it does not say: FP4, and E8M0 of older writers."""
BYTES = frozenset({E4M3, E5M2, E8M0, BYTE})


def _e4m3() -> Array:
    """Read sign, 4 bits of exponent and 3 of mantissa as half precision, whose bias is larger by 8."""
    code = np.arange(256, dtype=np.uint16)
    values = ((code & 0x80) << 8 | (code & 0x7F) << 7).view(np.float16).astype(np.float32) * np.float32(256)
    values[[0x7F, 0xFF]] = np.nan  # there are no infinities
    return values


def _e5m2() -> Array:
    """Read the upper half of half precision."""
    return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


def _e8m0() -> Array:
    """Read an exponent alone; the last code is NaN."""
    return np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))


def _fp4() -> Array:
    """Read two numbers of a byte, as one element of eight bytes."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    values, byte = np.concatenate([magnitudes, -magnitudes]), np.arange(256)
    pairs: Array = np.stack([values[byte & 15], values[byte >> 4]], -1)
    return pairs.view(np.uint64)[:, 0]


TABLES = {E4M3: _e4m3(), E5M2: _e5m2(), E8M0: _e8m0(), FP4: _fp4()}
"""What each byte means, in fp32; of FP4 an element is two numbers."""

_NO_NUMBER = {E4M3: 0x7F, E5M2: 0x7C, E8M0: 0xFF}
"""The first byte, but for a sign, that is NaN or an infinity."""


def decode(codes: Array, kind: str) -> Array:
    """Return the numbers that bytes mean, in fp32; of FP4 the last axis is twice as long."""
    return np.take(TABLES[kind], codes, mode="clip").view(np.float32)


def check_finite(codes: Array, kind: str, name: str) -> None:
    """Refuse bytes of a tensor that mean NaN or an infinity; those of FP4 never do.

    Raises:
        CheckpointError: naming the tensor.
    """
    limit = _NO_NUMBER.get(kind, 256)
    is_signed = kind in (E4M3, E5M2)
    if not codes.size or limit == 256:
        return
    if (is_signed and int(codes.view(np.int8).max()) >= limit) or int(codes.max()) >= limit + 128 * is_signed:
        count = int((~np.isfinite(TABLES[kind][codes])).sum())
        raise CheckpointError(
            f"{name} holds {count} or more values that are NaN or infinite ({kind})", "copy the checkpoint again"
        )
