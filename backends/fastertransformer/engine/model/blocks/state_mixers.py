"""Blocks with a state in the place of keys and values: Mamba 2 and the gated delta rule, as models/blocks describes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...cache.states import LayerState, StateShape
from ...ops.delta_mixing import DeltaMixing
from ...ops.linear import Linear, Norm
from ...ops.mamba_mixing import MambaMixing
from ...ops.ops import Ops
from ...ops.state_rows import StateRows
from .context import LayerContext


@dataclass(frozen=True)
class StateMixer(ABC):
    """One layer's block; H: heads of what comes out; P: width of one.

    Attributes:
        into: hidden -> what is mixed, the widest product of a step. Mamba: gate, x, B, C and dt, one after another; the
            delta rule: queries, keys, values and gates of the output, by kind or by head of the keys: see DeltaRule.
        mixing: what is between the products.
        out: H * P -> hidden, the row-parallel product that leads back.
    """

    into: Linear
    mixing: MambaMixing | DeltaMixing
    out: Linear

    @property
    def state(self) -> StateShape:
        """What the layer keeps of a row."""
        kind = self.mixing.kind
        return StateShape(kind.channels, kind.conv_size - 1, kind.memory)

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, state: LayerState) -> Tensor:
        """Compute what ``out`` is multiplied by, [B, T, H * P], of [B, T, hidden], normed first; the state goes on."""
        assert context.state_rows, "the cache keeps no states"

        def run(part: Tensor, rows: StateRows) -> Tensor:
            given = self._given(part, norm, context.ops.of_tokens(rows.tokens))
            return rows.mix(self.mixing, given, state, x.dtype).view(*part.shape[:2], -1)

        return context.state_rows.in_blocks(x, run)

    @abstractmethod
    def _given(self, x: Tensor, norm: Norm | None, ops: Ops) -> Sequence[Tensor]:
        """Compute what is mixed, [B * T, ...] each."""


@dataclass(frozen=True)
class MambaWeights(StateMixer):
    """Mamba 2.

    Attributes:
        sections: what the rows of ``into`` are multiplied by, fp32; None: nothing.
    """

    sections: Tensor | None = None

    def _given(self, x: Tensor, norm: Norm | None, ops: Ops) -> Sequence[Tensor]:
        projected = ops.linear(self.into, x, norm).flatten(0, 1)
        return (projected if self.sections is None else projected * self.sections,)


@dataclass(frozen=True)
class DeltaWeights(StateMixer):
    """The gated delta rule.

    Attributes:
        rates: hidden -> how much is learnt and forgotten, by kind or by head as ``into``.
    """

    rates: Linear

    def _given(self, x: Tensor, norm: Norm | None, ops: Ops) -> Sequence[Tensor]:
        normed = ops.norm(x, norm) if norm else x
        return [ops.linear(each, normed).flatten(0, 1) for each in (self.into, self.rates)]
