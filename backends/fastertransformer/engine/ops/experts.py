"""The products of experts: rows sorted by expert, and each expert's rows multiplied by its matrices.

Only the matrices of experts that have rows are read. On a CPU each matrix is packed by itself, as linear.py says; on a
GPU those of FP8 stay so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from .fp8 import Fp8Linear, ScaledNumbers
from .gates import ClampedGate
from .linear import ACTIVATIONS, Blocks, Linear


@dataclass(frozen=True)
class ExpertMatrices:
    """One matrix of each expert.

    Attributes:
        size_bytes: of all of them, biases included.
        packed: each by itself, on a CPU; empty: they are in ``weight``.
        weight: [experts, out, in], on a GPU.
        bias: [experts, out] beside ``weight``; None: there is none.
        scales: of FP8, fp32 [experts, out, blocks]; None: the numbers are what they are.
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

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out], by one expert's matrix."""
        if self.weight is None:
            return self.packed[expert](x)
        matrix = self.weight[expert]
        if self.scales is not None:
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
    """

    into: ExpertMatrices
    out: ExpertMatrices
    is_gated: bool
    activation: str
    clamped: ClampedGate | None = None


def run_experts(experts: Experts, x: Tensor, chosen: Tensor, counts: Tensor) -> Tensor:
    """Sum what each token's experts compute of it.

    Args:
        experts: of the layer, or this process's part of their middles.
        x: [N, hidden].
        chosen: int64 [N, used], experts.
        counts: fp32 [N, used], what their results are multiplied by.

    Returns:
        [N, hidden].
    """
    activate = ACTIVATIONS[experts.activation]
    used, flat, order = chosen.shape[1], chosen.flatten(), None
    if len(chosen) == 1:  # there is nothing to sort
        rows, busy = x.expand(used, -1), [(expert, 1) for expert in flat.tolist()]
    else:
        order = flat.argsort(stable=True)
        rows, every = x[order // used], flat.bincount(minlength=experts.into.count).tolist()
        busy = [(expert, count) for expert, count in enumerate(every) if count]
    inner = _grouped(experts.into, rows, busy)
    if experts.is_gated:
        first, second = inner.chunk(2, -1)
        clamped = experts.clamped
        inner = clamped(first, second) if clamped else activate(first.contiguous()).mul_(second)
    else:
        inner = activate(inner)
    results = _grouped(experts.out, inner, busy)
    if order is not None:
        results = torch.empty_like(results).index_copy_(0, order, results)
    summed = torch.bmm(counts[:, None], results.view(*chosen.shape, -1).float())
    return summed[:, 0].to(x.dtype)


def _grouped(matrices: ExpertMatrices, x: Tensor, busy: list[tuple[int, int]]) -> Tensor:
    """Multiply rows, sorted by expert, by the matrices: of each busy expert its number and how many rows it has."""
    parts = torch.split(x, [count for _, count in busy])
    return torch.cat([matrices.multiply(expert, part) for (expert, _), part in zip(busy, parts, strict=True)])
