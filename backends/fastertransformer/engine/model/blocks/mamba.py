"""Mamba 2: a state in the place of keys and values; what models/blocks/mamba.py describes, computed in torch.

All between the two products is computed in fp32, as transformers' class computes it. T: tokens; H: heads; P: width of
a head; G: groups; N: numbers of the state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from models.blocks.mamba import Mamba

from ...cache.states import LayerState, StateShape
from ...ops.linear import Linear, Norm
from ...ops.mamba_scan import MambaRecurrence
from ...ops.ops import Ops
from ...ops.state_rows import StateRows
from .context import LayerContext


@dataclass(frozen=True)
class MambaWeights:
    """Mamba 2 of one layer.

    Attributes:
        into: hidden -> gate, x, B, C and dt, one after another.
        conv, conv_bias: of x, B and C, fp32 [channels, tokens] and [channels]; None: there is no bias.
        recurrence: A and D.
        step_bias: what is added to dt, fp32 [H].
        norm: of the output, [H * P], by group; None: there is none.
        out: H * P -> hidden.
        kind: sizes, and how it computes.
        sections: what the rows of ``into`` are multiplied by, fp32; None: nothing.
    """

    into: Linear
    conv: Tensor
    conv_bias: Tensor | None
    recurrence: MambaRecurrence
    step_bias: Tensor
    norm: Norm | None
    out: Linear
    kind: Mamba
    sections: Tensor | None = None

    @property
    def state(self) -> StateShape:
        """See StateMixer."""
        return StateShape(self.kind.channels, self.kind.conv_size - 1, self.kind.memory)

    def inner(self, x: Tensor, norm: Norm | None, context: LayerContext, state: LayerState) -> Tensor:
        """Compute what ``out`` is multiplied by, [B, T, H * P], of [B, T, hidden], normed first."""
        assert context.state_rows, "the cache keeps no states"
        return context.state_rows.in_blocks(x, lambda part, rows: self._run(part, norm, context.ops, rows, state))

    def _run(self, x: Tensor, norm: Norm | None, ops: Ops, rows: StateRows, state: LayerState) -> Tensor:
        kind = self.kind
        projected = ops.linear(self.into, x, norm).flatten(0, 1).float()
        if self.sections is not None:
            projected = projected * self.sections
        gate, convolved, step = torch.split(projected, [kind.inter_size, kind.channels, kind.head_num], -1)
        convolved = rows.convolve(convolved, self.conv, self.conv_bias, state.past)
        own, into, out_of = torch.split(convolved, [kind.widths[name] for name in kind.conv_sections], -1)
        given = (
            cut(own, kind.head_num),
            F.softplus(step + self.step_bias).clamp(min=kind.least_step),
            cut(into, kind.group_num),
            cut(out_of, kind.group_num),
        )
        found = rows.scan(self.recurrence, given, state.memory).flatten(1)
        return self._gated(found, F.silu(gate)).to(x.dtype).view(*x.shape[:2], -1)

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Multiply the gate in, before the norm or behind it."""
        if not self.norm:
            return x * gate
        if self.kind.has_norm_before_gate:
            return self._normed(x, self.norm) * gate
        return self._normed(x * gate, self.norm)

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        groups = cut(x, self.kind.group_num)
        return F.rms_norm(groups, groups.shape[-1:], eps=norm.eps).flatten(-2) * norm.weight


def cut(x: Tensor, count: int) -> Tensor:
    """Cut the last axis into parts of one size, [..., n] -> [..., count, n / count]."""
    return x.view(*x.shape[:-1], count, -1)
