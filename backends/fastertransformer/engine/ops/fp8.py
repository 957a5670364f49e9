"""Matrices whose numbers are FP8 (E4M3), each multiplied by a scale that it shares with others of its row or block.

They are multiplied with activations as these are; or, where that was asked for and each row has one scale, with
activations that are rounded to FP8 by token, on a GPU's tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from .linear import Linear

_MOST_AT_ONCE = 1 << 22  # numbers that are multiplied at a time on a CPU: 16 MiB in fp32
_LARGEST, _EVEN = 448.0, 16  # of E4M3; what both sides of a matrix are multiples of for torch._scaled_mm


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
    """A matrix that is kept as FP8, and multiplied in the type that is computed in.

    Args:
        scaled: numbers and scales.
        bias: [out] or None.
        rounds: whether activations are rounded to FP8, by token, if the matrix can be multiplied so.
    """

    has_kernels = False
    scales: Tensor

    def __init__(self, scaled: ScaledNumbers, bias: Tensor | None = None, rounds: bool = False) -> None:
        self.bias, self.folded, self._zeros = bias, {}, None
        self._scaled, self.weight, self.scales = scaled, scaled.numbers, scaled.scales
        has_row_scales, is_even = scaled.scales.shape[1] == 1, not any(n % _EVEN for n in scaled.numbers.shape)
        self._rounds = rounds and has_row_scales and is_even
        self.size_bytes = sum(each.nbytes for each in (self.weight, self.scales, bias) if each is not None)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return the products, [out, in]."""
        return self._scaled.write(torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device), dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], same type."""
        return self._by_token(x) if self._rounds else F.linear(x, self.matrix(x.dtype), self.bias)

    def _by_token(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scales = rows.abs().amax(1, keepdim=True).float().clamp_(min=1e-12).div_(_LARGEST)
        codes = (rows / scales).to(torch.float8_e4m3fn)  # in fp32, for the scales are
        y = torch._scaled_mm(codes, self.weight.T, scales, self.scales.T, out_dtype=torch.bfloat16).to(x.dtype)
        return (y if self.bias is None else y.add_(self.bias)).view(*x.shape[:-1], len(self.weight))
