"""The gated delta rule between its products, in torch: a short convolution, the recurrence, a norm and a gate.

All of it is computed in fp32, as transformers' class computes it. T: tokens; G: heads of queries and keys; R: heads of
values that share one of these, and follow one another; H: heads of values, G * R; K, V: widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from models.blocks.delta_rule import DeltaRule

from ..cache.states import LayerState
from .delta_scan import DeltaRecurrence
from .linear import Norm
from .state_rows import StateRows, cut

_RECURRENCE = DeltaRecurrence()


@dataclass(frozen=True)
class DeltaMixing:
    """What a layer computes of two tensors, [T, ...]: see DeltaWeights.into and DeltaWeights.rates.

    Attributes:
        conv: of queries, keys and values, fp32 [channels, tokens].
        decay, step_bias: what forgetting is multiplied by, below 0, and what is added to it before, fp32 [H].
        norm: of each head's output, [V].
        kind: sizes.
    """

    conv: Tensor
    decay: Tensor
    step_bias: Tensor
    norm: Norm
    kind: DeltaRule

    @cached_property
    def columns(self) -> tuple[Tensor, ...]:
        """Where a token's input has queries, keys and values, and gates, and its rates the two: int32, for kernels."""
        kind, device = self.kind, self.conv.device
        given = torch.arange(kind.key_head_num * kind.in_per_key, dtype=torch.int32, device=device)
        rates = torch.arange(2 * kind.value_head_num, dtype=torch.int32, device=device)
        return tuple(each[0].contiguous() for each in (*self.split(given[None]), *self.split_rates(rates[None])))

    def mix(self, rows: StateRows, given: Sequence[Tensor], state: LayerState) -> Tensor:
        """See Mixing."""
        kind, (projected, rates) = self.kind, (each.float() for each in given)
        mixed, gate = self.split(projected)
        rate, forgotten = self.split_rates(rates)
        widths = [kind.key_head_num * kind.key_size] * 2 + [kind.value_head_num * kind.value_size]
        query, key, value = torch.split(rows.convolve(mixed, self.conv, None, state.past), widths, -1)
        scanned = (
            cut(query, kind.key_head_num),
            cut(key, kind.key_head_num),
            cut(value, kind.value_head_num),
            self.decay * F.softplus(forgotten + self.step_bias),
            rate.sigmoid(),
        )
        found = rows.scan(_RECURRENCE, scanned, state.memory)
        return F.rms_norm(found, found.shape[-1:], self.norm.weight, self.norm.eps).flatten(1) * F.silu(gate)

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values by kind, [T, channels], and the gates of the output, [T, H * V]."""
        kind = self.kind
        if kind.is_by_kind:
            mixed, gate = torch.split(projected, [kind.channels, kind.value_head_num * kind.value_size], -1)
            return mixed, gate
        values = kind.heads_per_key * kind.value_size
        parts = torch.split(cut(projected, kind.key_head_num), [kind.key_size, kind.key_size, values, values], -1)
        *mixed_parts, gate = (each.flatten(1) for each in parts)
        return torch.cat(mixed_parts, 1), gate

    def split_rates(self, rates: Tensor) -> tuple[Tensor, Tensor]:
        """Return how much is learnt, and forgotten, [T, H] each, before sigmoid and softplus."""
        learnt, forgotten = (rates if self.kind.is_by_kind else cut(rates, self.kind.key_head_num)).chunk(2, -1)
        return learnt.flatten(1), forgotten.flatten(1)
