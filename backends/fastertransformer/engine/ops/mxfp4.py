"""MXFP4: numbers of 4 bits (E2M1), two to a byte, and for each 32 of a row a power of two (E8M0)."""

from __future__ import annotations

import torch
from torch import Tensor

from models.mxfp4 import GROUP

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # of exponents
_MOST_AT_ONCE = 1 << 22  # numbers: 16 MiB in fp32


def dequantize(numbers: Tensor, powers: Tensor, rounded: torch.dtype) -> Tensor:
    """Multiply numbers, uint8 [out, in / 2], by their powers of two, uint8 [out, in / 32] -> [out, in] of a type.

    In bf16 and fp32 that is exact.
    """
    values = torch.tensor([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], device=numbers.device)
    outputs, inputs = len(numbers), 2 * numbers.shape[1]
    target = torch.empty(outputs, inputs, dtype=rounded, device=numbers.device)
    step = max(1, _MOST_AT_ONCE // inputs)
    for start in range(0, outputs, step):
        part, exponents = numbers[start : start + step], powers[start : start + step]
        codes = torch.stack((part & 15, part >> 4), -1).int().view(*exponents.shape, GROUP)
        scaled = torch.ldexp(values[codes], exponents[..., None].int() - _BIAS)
        target[start : start + step] = scaled.flatten(1).to(rounded)
    return target
