"""The gated delta rule: a state in the place of keys and values; what models/blocks/delta_rule.py describes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...cache.states import LayerState, StateShape
from ...ops.delta_mixing import DeltaMixing
from ...ops.linear import Linear, Norm
from ...ops.ops import Ops
from ...ops.state_rows import StateRows
from .context import LayerContext


@dataclass(frozen=True)
class DeltaWeights:
    """The gated delta rule of one layer; H: heads of values; V: width of one.

    Attributes:
        into: hidden -> queries, keys, values and gates of the output, by kind or by head of the keys: see DeltaRule.
        rates: hidden -> how much is learnt and forgotten, likewise.
        mixing: what is between the products.
        out: H * V -> hidden.
    """

    into: Linear
    rates: Linear
    mixing: DeltaMixing
    out: Linear

    @property
    def state(self) -> StateShape:
        """See StateMixer."""
        kind = self.mixing.kind
        return StateShape(kind.channels, kind.conv_size - 1, kind.memory)

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, state: LayerState) -> Tensor:
        """Compute what ``out`` is multiplied by, [B, T, H * V], of [B, T, hidden], normed first."""
        assert context.state_rows, "the cache keeps no states"
        return context.state_rows.in_blocks(x, lambda part, rows: self._run(part, norm, context.ops, rows, state))

    def _run(self, x: Tensor, norm: Norm | None, ops: Ops, rows: StateRows, state: LayerState) -> Tensor:
        normed = ops.norm(x, norm) if norm else x
        given = [ops.linear(each, normed).flatten(0, 1) for each in (self.into, self.rates)]
        return rows.mix(self.mixing, given, state, x.dtype).view(*x.shape[:2], -1)
