"""Mamba 2: a state in the place of keys and values; what models/blocks/mamba.py describes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...cache.states import LayerState, StateShape
from ...ops.linear import Linear, Norm
from ...ops.mamba_mixing import MambaMixing
from ...ops.ops import Ops
from ...ops.state_rows import StateRows
from .context import LayerContext


@dataclass(frozen=True)
class MambaWeights:
    """Mamba 2 of one layer; H: heads; P: width of a head.

    Attributes:
        into: hidden -> gate, x, B, C and dt, one after another.
        mixing: what is between the two products.
        out: H * P -> hidden.
        sections: what the rows of ``into`` are multiplied by, fp32; None: nothing.
    """

    into: Linear
    mixing: MambaMixing
    out: Linear
    sections: Tensor | None = None

    @property
    def state(self) -> StateShape:
        """See StateMixer."""
        kind = self.mixing.kind
        return StateShape(kind.channels, kind.conv_size - 1, kind.memory)

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, state: LayerState) -> Tensor:
        """Compute what ``out`` is multiplied by, [B, T, H * P], of [B, T, hidden], normed first."""
        assert context.state_rows, "the cache keeps no states"
        return context.state_rows.in_blocks(x, lambda part, rows: self._run(part, norm, context.ops, rows, state))

    def _run(self, x: Tensor, norm: Norm | None, ops: Ops, rows: StateRows, state: LayerState) -> Tensor:
        projected = ops.linear(self.into, x, norm).flatten(0, 1)
        if self.sections is not None:
            projected = projected * self.sections
        return rows.mix(self.mixing, (projected,), state, x.dtype).view(*x.shape[:2], -1)
