"""The gated delta rule: a state in the place of keys and values; what models/blocks/delta_rule.py describes, in torch.

All between the products is computed in fp32. T: tokens; G: heads of queries and keys; R: heads of values that share
one of these, and follow one another; H: heads of values, G * R; K, V: widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from models.blocks.delta_rule import DeltaRule

from ...cache.states import LayerState, StateShape
from ...ops.delta_scan import DeltaRecurrence
from ...ops.linear import Linear, Norm
from ...ops.ops import Ops
from ...ops.state_rows import StateRows
from .context import LayerContext
from .mamba import cut

_RECURRENCE = DeltaRecurrence()


@dataclass(frozen=True)
class DeltaWeights:
    """The gated delta rule of one layer.

    Attributes:
        into: hidden -> queries, keys, values and gates of the output, by kind or by head of the keys: see ``kind``.
        rates: hidden -> how much is learnt and forgotten, likewise.
        conv: of queries, keys and values, fp32 [channels, tokens].
        decay, step_bias: what forgetting is multiplied by, below 0, and what is added to it before, fp32 [H].
        norm: of each head's output, [V].
        out: H * V -> hidden.
        kind: sizes.
    """

    into: Linear
    rates: Linear
    conv: Tensor
    decay: Tensor
    step_bias: Tensor
    norm: Norm
    out: Linear
    kind: DeltaRule

    @property
    def state(self) -> StateShape:
        """See StateMixer."""
        return StateShape(self.kind.channels, self.kind.conv_size - 1, self.kind.memory)

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, state: LayerState) -> Tensor:
        """Compute what ``out`` is multiplied by, [B, T, H * V], of [B, T, hidden], normed first."""
        assert context.state_rows, "the cache keeps no states"
        return context.state_rows.in_blocks(x, lambda part, rows: self._run(part, norm, context.ops, rows, state))

    def _run(self, x: Tensor, norm: Norm | None, ops: Ops, rows: StateRows, state: LayerState) -> Tensor:
        kind = self.kind
        normed = ops.norm(x, norm) if norm else x
        projected, rates = (ops.linear(each, normed).flatten(0, 1).float() for each in (self.into, self.rates))
        mixed, gate = self._split(projected)
        rate, forgotten = (each.flatten(1) for each in (rates if kind.is_by_kind else self._by_key(rates)).chunk(2, -1))
        widths = [kind.key_head_num * kind.key_size] * 2 + [kind.value_head_num * kind.value_size]
        query, key, value = torch.split(rows.convolve(mixed, self.conv, None, state.past), widths, -1)
        given = (
            cut(query, kind.key_head_num),
            cut(key, kind.key_head_num),
            cut(value, kind.value_head_num),
            self.decay * F.softplus(forgotten + self.step_bias),
            rate.sigmoid(),
        )
        found = rows.scan(_RECURRENCE, given, state.memory)
        found = F.rms_norm(found, found.shape[-1:], self.norm.weight, self.norm.eps).flatten(1)
        return (found * F.silu(gate)).to(x.dtype).view(*x.shape[:2], -1)

    def _split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values by kind, [T, channels], and the gates of the output, [T, H * V]."""
        kind = self.kind
        if kind.is_by_kind:
            mixed, gate = torch.split(projected, [kind.channels, kind.value_head_num * kind.value_size], -1)
            return mixed, gate
        values = kind.heads_per_key * kind.value_size
        parts = torch.split(self._by_key(projected), [kind.key_size, kind.key_size, values, values], -1)
        *mixed_parts, gate = (each.flatten(1) for each in parts)
        return torch.cat(mixed_parts, 1), gate

    def _by_key(self, projected: Tensor) -> Tensor:
        """[T, ...] -> [T, G, what belongs to a head of the keys]."""
        return cut(projected, self.kind.key_head_num)
