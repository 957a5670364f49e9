"""Matrices whose numbers are FP8 (E4M3), each multiplied by a scale that it shares with others of its row or block.

They are multiplied with activations as these are; or, where that was asked for, with activations that are rounded to
FP8, on a GPU's tensor cores: by token where each row has one scale, else by token and block of columns. Few rows are
not rounded: their products take as long as the matrix takes to be read. Where the files have a scale for them they are
always rounded by it.

A matrix of other numbers is quantized to the very bytes that ``export.model.quantization`` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from .linear import Blocks, Linear

LEAST_BLOCK = 16
"""Columns of an expert with one scale that kernels multiply: tensor cores take no fewer at a time."""
_MOST_AT_ONCE = 1 << 22  # numbers that are multiplied at a time on a CPU: 16 MiB in fp32
LARGEST = 448.0  # of E4M3
_LEAST_SCALE = 1e-12
_EVEN = 16  # both sides of a matrix are multiples of it for torch._scaled_mm
_ROUNDED_BLOCKS = (64, 128)


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

    @property
    def blocks(self) -> Blocks | None:
        """Which columns share a scale; None: all of a row."""
        return Blocks(self.width, self.first) if self.scales.shape[-1] > 1 else None

    @classmethod
    def of(cls, numbers: Tensor, scales: Tensor, blocks: Blocks | None) -> ScaledNumbers:
        """Put numbers and their scales together."""
        return cls(numbers, scales, *(blocks or (numbers.shape[1], 0)))

    @classmethod
    def joined(cls, parts: Sequence[ScaledNumbers]) -> ScaledNumbers:
        """Put matrices whose columns share scales alike behind each other, in memory of their own."""
        bytes_of = torch.cat([part.numbers.view(torch.uint8) for part in parts])
        scales = torch.cat([part.scales for part in parts])
        return cls(bytes_of.view(torch.float8_e4m3fn), scales, parts[0].width, parts[0].first)


class Fp8Linear(Linear):
    """A matrix that is kept as FP8.

    Args:
        scaled: numbers and scales.
        bias: [out] or None.
        rounds: whether activations are rounded to FP8, if the matrix can be multiplied so.
    """

    scales: Tensor

    def __init__(self, scaled: ScaledNumbers, bias: Tensor | None = None, rounds: bool = False) -> None:
        self.bias, self.folded, self._zeros = bias, {}, None
        self._keep(scaled)
        self.rounds = rounds and _can_round(scaled.numbers, self.blocks)
        if self.rounds and self.blocks:
            self.scales_by_block = self.scales.T.contiguous()
        kept = self.weight, self.scales, self.scales_by_block, bias
        self.size_bytes = sum(each.nbytes for each in kept if each is not None)

    def _keep(self, scaled: ScaledNumbers) -> None:
        self._scaled, self.weight, self.scales, self.blocks = scaled, scaled.numbers, scaled.scales, scaled.blocks

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """See Linear."""
        return self._scaled.write(torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device), dtype)

    def join(self, other: Linear) -> None:
        """See Linear."""
        has_bias = self.bias is not None or other.bias is not None
        if self.weight.is_cuda and isinstance(other, Fp8Linear) and self.blocks == other.blocks and not has_bias:
            joined, outputs = ScaledNumbers.joined((self._scaled, other._scaled)), len(self.weight)
            whole = Fp8Linear(joined, None, self.rounds)
            self.joined, other.joined, other.joined_at = whole, whole, outputs
            for each, rows in ((self, slice(outputs)), (other, slice(outputs, None))):
                each._keep(joined._replace(numbers=joined.numbers[rows], scales=joined.scales[rows]))

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], same type."""
        if not self.rounds:
            return F.linear(x, self.matrix(x.dtype), self.bias)
        codes, scales = round_rows(x.reshape(-1, x.shape[-1]), self.blocks)
        if self.blocks:
            return F.linear((codes.float() * scales).view(x.shape).to(x.dtype), self.matrix(x.dtype), self.bias)
        y = torch._scaled_mm(codes, self.weight.T, scales, self.scales.T, out_dtype=torch.bfloat16).to(x.dtype)
        return (y if self.bias is None else y.add_(self.bias)).view(*x.shape[:-1], len(self.weight))


class StaticLinear(Linear):
    """A matrix whose input is rounded to FP8 by a scale that was measured before, as whoever published it does.

    Args:
        linear: multiplies what is rounded.
        scales: fp32 [], of one or several matrices behind each other; None: the input of these rows is not rounded.
        rows: of each of them.
    """

    has_kernels = False

    def __init__(self, linear: Linear, scales: Sequence[Tensor | None], rows: Sequence[int]) -> None:
        self.linear, self.weight, self.bias, self.folded, self._zeros = linear, linear.weight, linear.bias, {}, None
        self.size_bytes = linear.size_bytes + sum(each.nbytes for each in scales if each is not None)
        self._parts: list[tuple[Tensor | None, int]] = []
        for scale, count in zip(scales, rows, strict=True):
            if self._parts and _are_one(scale, self._parts[-1][0]):
                count += self._parts.pop()[1]
            self._parts.append((scale, count))

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """See Linear."""
        return self.linear.matrix(dtype)

    def by(self, multiply: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Multiply what x, [..., in], is rounded to; where scales differ, once for each of them."""
        found, first = list[Tensor](), 0
        for scale, rows in self._parts:
            y = multiply(x if scale is None else round_statically(x, scale))
            found.append(y[..., first : first + rows])
            first += rows
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], same type."""
        return self.by(self.linear, x)


def _are_one(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.is_meta or bool(one == other)


def round_statically(x: Tensor, scale: Tensor) -> Tensor:
    """Round numbers to multiples of a scale that FP8 has; those beyond the largest one become it."""
    codes = (x.float() / scale).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.float().mul_(scale).to(x.dtype)


def quantized(values: Tensor, rounded: torch.dtype, block: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Quantize a matrix: numbers, and a scale in fp32 for each block.

    Args:
        values: of any type, [rows, columns].
        rounded: type to which they are rounded first; scales of single rows are rounded to it too.
        block: rows and columns of it that share a scale; those at the ends may be smaller.
    """
    (rows, columns), (height, width) = values.shape, block
    numbers = torch.empty(values.shape, dtype=torch.float8_e4m3fn, device=values.device)
    grid = numbers.new_empty((-(-rows // height), -(-columns // width)), dtype=torch.float32)
    largest = grid.new_full((), LARGEST)  # a GPU multiplies by the reciprocal of a number of the host's
    step = max(1, _MOST_AT_ONCE // (height * columns)) * height
    for start in range(0, rows, step):
        band = values[start : start + step].to(rounded).float()
        padded = F.pad(band, (0, -columns % width, 0, -len(band) % height))
        peaks = padded.reshape(-(-len(band) // height), height, -1, width).abs().amax((1, 3))
        scales = peaks / largest
        if height == 1:  # as compressed-tensors has them, which takes the type's epsilon for a row of zeros
            scales = scales.to(rounded)
            scales = torch.where(scales == 0, torch.finfo(rounded).eps, scales).float()
        else:
            scales = torch.where(peaks == 0, 1.0, scales)
        grid[start // height :][: len(scales)] = scales
        each = scales.repeat_interleave(height, 0)[: len(band)].repeat_interleave(width, 1)[:, :columns]
        numbers[start : start + step] = (band / each).clamp_(-LARGEST, LARGEST).to(numbers.dtype)
    return numbers, grid


def round_rows(x: Tensor, blocks: Blocks | None) -> tuple[Tensor, Tensor]:
    """Round rows to FP8: numbers, [rows, in], or a row for each block, and scales, fp32 [..., 1], for their largest."""
    rows = x.view(-1, blocks.width) if blocks else x
    scales = rows.abs().amax(1, keepdim=True).float().clamp_(min=_LEAST_SCALE).div_(LARGEST)
    return (rows / scales).to(torch.float8_e4m3fn), scales  # in fp32, for the scales are


def block_of(blocks: Blocks) -> int:
    """Return how many columns from each multiple of that number on share a scale: a power of two."""
    both = gcd(*blocks)
    return both & -both


def _can_round(numbers: Tensor, blocks: Blocks | None) -> bool:
    outputs, inputs = numbers.shape
    if blocks:
        return blocks.width in _ROUNDED_BLOCKS and not blocks.first and not inputs % blocks.width
    return not outputs % _EVEN and not inputs % _EVEN
