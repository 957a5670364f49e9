"""Mamba 2 between its two products, in torch: a short convolution, the recurrence, and a gate with a norm.

All of it is computed in fp32, as transformers' class computes it. T: tokens; H: heads; P: width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from models.blocks.mamba import Mamba

from ..cache.states import LayerState
from .linear import Norm
from .mamba_scan import MambaRecurrence
from .state_rows import StateRows, cut


@dataclass(frozen=True)
class MambaMixing:
    """What a layer computes of gate, x, B, C and dt, which lie one after another: one tensor, [T, channels].

    Attributes:
        conv, conv_bias: of x, B and C, fp32 [channels, tokens] and [channels]; None: there is no bias.
        recurrence: A and D.
        step_bias: what is added to dt, fp32 [H].
        norm: of the output, [H * P], by group; None: there is none.
        kind: sizes, and how it computes.
    """

    conv: Tensor
    conv_bias: Tensor | None
    recurrence: MambaRecurrence
    step_bias: Tensor
    norm: Norm | None
    kind: Mamba

    @cached_property
    def columns(self) -> tuple[Tensor, Tensor]:
        """Where x, B and C, and the gate, are in a token's input: int32, for kernels."""
        inner, ends = self.kind.inter_size, self.kind.inter_size + self.kind.channels
        places = torch.arange(ends, dtype=torch.int32, device=self.conv.device)
        return places[inner:], places[:inner]

    def mix(self, rows: StateRows, given: Sequence[Tensor], state: LayerState) -> Tensor:
        """See Mixing."""
        kind, (projected,) = self.kind, given
        gate, convolved, step = torch.split(projected.float(), [kind.inter_size, kind.channels, kind.head_num], -1)
        convolved = rows.convolve(convolved, self.conv, self.conv_bias, state.past)
        own, into, out_of = torch.split(convolved, [kind.widths[name] for name in kind.conv_sections], -1)
        scanned = (
            cut(own, kind.head_num),
            F.softplus(step + self.step_bias).clamp(min=kind.least_step),
            cut(into, kind.group_num),
            cut(out_of, kind.group_num),
        )
        return self._gated(rows.scan(self.recurrence, scanned, state.memory).flatten(1), F.silu(gate))

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
