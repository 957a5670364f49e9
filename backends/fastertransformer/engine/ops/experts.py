"""The products of experts: rows sorted by expert, and each expert's rows multiplied by its matrices.

Only the matrices of experts that have rows are read. On a GPU those of FP8 and MXFP4 stay so. On a CPU each matrix is
packed by itself, as linear.py says. Where oneDNN multiplies them, no product has fewer than four rows: it reads packed
weights quicker for four rows than for one or two, and here nearly every matrix comes from memory. Of 48 experts of
288 x 768, 8 for each token, in 12 layers: 29 ms for one token instead of 37, 131 instead of 157 for eight (processor
time on an AMD EPYC, torch 2.13, fp32).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from . import mxfp4
from .fp8 import Fp8Linear, ScaledNumbers
from .gates import ClampedGate
from .linear import ACTIVATIONS, LEAST_ROWS, Blocks, Linear, padded_rows


@dataclass(frozen=True)
class ExpertMatrices:
    """One matrix of each expert.

    Attributes:
        size_bytes: of all of them, biases included.
        packed: each by itself, on a CPU; empty: they are in ``weight``.
        weight: [experts, out, in], on a GPU; of MXFP4 uint8 [experts, out, in / 2].
        bias: [experts, out] beside ``weight``; None: there is none.
        scales: of FP8, fp32 [experts, out, blocks]; of MXFP4 uint8 [experts, out, in / 32]; None: the numbers are what
            they are.
        blocks: of columns that have one scale each; None: all of a row have.
    """

    size_bytes: int
    packed: tuple[Linear, ...] = ()
    weight: Tensor | None = None
    bias: Tensor | None = None
    scales: Tensor | None = None
    blocks: Blocks | None = None

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self.packed) if self.weight is None else len(self.weight)

    @property
    def is_packed(self) -> bool:
        """Whether they are MXFP4."""
        return self.weight is not None and self.weight.dtype == torch.uint8

    @property
    def inputs(self) -> int:
        """Columns of a matrix on a GPU."""
        assert self.weight is not None
        return self.weight.shape[2] * (1 + self.is_packed)

    def padded(self, count: int) -> int:
        """Return how many rows a product of one expert's matrix is made with, for a number of rows."""
        if self.weight is not None or not count or self.packed[0].panels:
            return count
        return max(LEAST_ROWS, padded_rows(count))

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out], by one expert's matrix."""
        if self.weight is None:
            return self.packed[expert](x)
        matrix = self.weight[expert]
        if self.is_packed and self.scales is not None:
            matrix = mxfp4.dequantize(matrix, self.scales[expert], x.dtype)
        elif self.scales is not None:
            matrix = Fp8Linear(ScaledNumbers.of(matrix, self.scales[expert], self.blocks)).matrix(x.dtype)
        return F.linear(x, matrix, None if self.bias is None else self.bias[expert])


@dataclass(frozen=True)
class Experts:
    """The experts of a layer.

    Attributes:
        into: hidden -> inter, or where they are gated twice that: what is activated, and behind it what multiplies it.
        out: inter -> hidden.
        is_gated: whether there is a gate.
        activation: of the middle, one of linear.ACTIVATIONS.
        clamped: what the gate is in place of that; None: it is that.
        first: number of the first one here, where other processes have the others; None: all are here.
    """

    into: ExpertMatrices
    out: ExpertMatrices
    is_gated: bool
    activation: str
    clamped: ClampedGate | None = None
    first: int | None = None

    def numbered(self, chosen: Tensor) -> Tensor:
        """Return the numbers that chosen experts have here; those of other processes have that behind the last one."""
        own = chosen - (self.first or 0)
        return own.masked_fill_((own < 0) | (own >= self.into.count), self.into.count)


def run_experts(experts: Experts, x: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
    """Sum what each token's experts compute of it.

    Args:
        experts: of the layer, or this process's part of them.
        x: [N, hidden].
        chosen: int64 [N, used], experts; see ``Experts.numbered`` where some are elsewhere.
        counts: fp32 [N, used], what their results are multiplied by.

    Returns:
        [N, hidden].
    """
    activate = ACTIVATIONS[experts.activation]
    is_one = len(chosen) == 1 and experts.first is None
    groups = _one_token(experts, chosen) if is_one else _by_expert(experts, chosen)
    if not groups.busy:
        return torch.zeros_like(x)
    inner = _grouped(experts.into, x[groups.source], groups)
    if experts.is_gated:
        first, second = inner.chunk(2, -1)
        clamped = experts.clamped
        inner = clamped(first, second) if clamped else activate(first.contiguous()).mul_(second)
    else:
        inner = activate(inner)
    results = _grouped(experts.out, inner, groups)
    if experts.first is not None:
        results = F.pad(results, (0, 0, 0, groups.elsewhere))
    results = results[groups.place].view(*chosen.shape, -1)
    return torch.bmm(counts[:, None], results.float())[:, 0].to(x.dtype)


class _Groups(NamedTuple):
    """Rows by expert: those of one are a group, and where a product needs more, rows that are not read follow them.

    Attributes:
        busy: number of each expert that has rows, in order.
        sizes: rows of the group of each of them.
        source: int64 [all rows], token of each row.
        place: int64 [N * used], row of each token's experts, as they are chosen; those elsewhere are behind all rows.
        elsewhere: how many these are.
    """

    busy: list[int]
    sizes: list[int]
    source: Tensor
    place: Tensor
    elsewhere: int = 0


def _one_token(experts: Experts, chosen: Tensor) -> _Groups:
    """Return the groups of one token: there is nothing to sort."""
    busy = chosen[0].tolist()
    size = experts.into.padded(1)
    source = chosen.new_zeros(size * len(busy))
    return _Groups(busy, [size] * len(busy), source, torch.arange(0, len(source), size, device=chosen.device))


def _by_expert(experts: Experts, chosen: Tensor) -> _Groups:
    flat, used = chosen.flatten(), chosen.shape[1]
    sorted_, order = flat.sort(stable=True)
    counts = flat.bincount(minlength=experts.into.count).tolist()[: experts.into.count]
    sizes = [experts.into.padded(count) for count in counts]
    before = list(accumulate((size - count for size, count in zip(sizes, counts, strict=True)), initial=0))
    place = torch.arange(len(flat), device=flat.device) + torch.tensor(before, device=flat.device)[sorted_]
    own = sum(counts)
    source = order.new_zeros(sum(sizes)).index_copy_(0, place[:own], order[:own] // used)
    busy = [expert for expert, size in enumerate(sizes) if size]
    of_chosen = torch.empty_like(place).index_copy_(0, order, place)
    return _Groups(busy, [sizes[expert] for expert in busy], source, of_chosen, len(flat) - own)


def _grouped(matrices: ExpertMatrices, x: Tensor, groups: _Groups) -> Tensor:
    """Multiply each group by its expert's matrix."""
    parts = torch.split(x, groups.sizes)
    return torch.cat([matrices.multiply(expert, part) for expert, part in zip(groups.busy, parts, strict=True)])
