"""The plain feed-forward: one matrix in, a gate or none, and one matrix out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ...ops.linear import ACTIVATIONS, Linear, Norm
from .context import LayerContext


class FeedForward(Protocol):
    """What a layer asks of the block that works on each token by itself."""

    @property
    def out(self) -> Linear | None:
        """The row-parallel product that leads back into the residual stream; None: ``inner`` has made it."""

    @property
    def step_bytes(self) -> int:
        """Bytes of the matrices that a token's first products read."""

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, then: Linear | None = None) -> Tensor:
        """Compute what ``out`` is multiplied by, or this process's part of the sum, of [B, T, hidden], normed first.

        ``then``: ``out``, where nothing but its product is made of the result; see ops.Ops.gated_linear.
        """


@dataclass(frozen=True)
class DenseWeights:
    """A feed-forward that every token uses.

    Attributes:
        into: hidden -> inter, which is activated.
        gate: hidden -> inter, which into's activated output is multiplied by; None: there is no gate.
        out: inter -> hidden.
        activation: one of linear.ACTIVATIONS.
        ia3: what out's input is multiplied with, [tasks, inter]; None: nothing is.
        factor: what is multiplied in before the activation.
    """

    into: Linear
    gate: Linear | None
    out: Linear
    activation: str
    ia3: Tensor | None = None
    factor: float = 1.0

    def __post_init__(self) -> None:
        """Prepare the products of a gate."""
        if self.gate and self.factor == 1:
            self.into.join(self.gate)
            self.out.input_gate = self.activation

    @property
    def step_bytes(self) -> int:
        """See FeedForward."""
        return self.into.size_bytes

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, then: Linear | None = None) -> Tensor:
        """Compute this process's part of [B, T, inter]."""
        ops = context.ops
        if self.factor != 1:
            x = ops.norm(x, norm) if norm else x
            inner = ACTIVATIONS[self.activation](ops.linear(self.into, x) * self.factor)
            return inner * ops.linear(self.gate, x) if self.gate else inner
        if self.gate:
            inner = ops.gated_linear(self.into, self.gate, x, norm, self.activation, then if self.ia3 is None else None)
        else:
            inner = ops.linear(self.into, x, norm, self.activation)
        if self.ia3 is not None and context.tasks is not None:
            inner *= self.ia3[context.tasks]
        return inner
