"""Matrices whose numbers are FP8 (E4M3), each multiplied by a scale that it shares with others of its row or block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from .linear import Linear

_MOST_AT_ONCE = 1 << 22  # numbers that are multiplied at a time on a CPU: 16 MiB in fp32


class ScaledNumbers(NamedTuple):
    """A matrix, or some rows and columns of one.

    Attributes:
        numbers: float8_e4m3fn [out, in].
        scales: fp32 [out, n].
        width: columns that share a scale.
        first: of the columns in the first of these blocks.
    """

    numbers: Tensor
    scales: Tensor
    width: int
    first: int = 0

    def write(self, target: Tensor, rounded: torch.dtype) -> Tensor:
        """Write the products, made in fp32 and rounded to a type, to a matrix of any; returns it."""
        outputs, inputs = self.numbers.shape
        columns = (torch.arange(inputs, device=self.scales.device) + self.first) // self.width
        step = outputs if target.is_cuda or target.is_meta else max(1, _MOST_AT_ONCE // inputs)
        for start in range(0, outputs, step):
            rows = slice(start, start + step)
            scales = self.scales[rows] if self.scales.shape[1] == 1 else self.scales[rows][:, columns]
            target[rows] = self.numbers[rows].float().mul_(scales).to(rounded)
        return target

    @classmethod
    def joined(cls, parts: Sequence[ScaledNumbers]) -> ScaledNumbers:
        """Put matrices whose columns share scales alike behind each other, in memory of their own."""
        bytes_of = torch.cat([part.numbers.view(torch.uint8) for part in parts])
        scales = torch.cat([part.scales for part in parts])
        return cls(bytes_of.view(torch.float8_e4m3fn), scales, parts[0].width, parts[0].first)


class Fp8Linear(Linear):
    """A matrix that is kept as FP8, and multiplied in the type that is computed in."""

    has_kernels = False
    scales: Tensor

    def __init__(self, scaled: ScaledNumbers, bias: Tensor | None = None) -> None:
        self.bias, self.folded, self._zeros = bias, {}, None
        self._scaled, self.weight, self.scales = scaled, scaled.numbers, scaled.scales
        self.size_bytes = sum(each.nbytes for each in (self.weight, self.scales, bias) if each is not None)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """See Linear."""
        return self._scaled.write(torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device), dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], same type."""
        return F.linear(x, self.matrix(x.dtype), self.bias)
