"""What is between the products of layers with states, on an NVIDIA GPU: Triton's kernels; nothing waits for the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..cache.states import LayerState
from .delta_mixing import DeltaMixing
from .kernels import delta_scan, mamba_scan
from .kernels.gated_norm import Gate, gate_groups
from .kernels.row_blocks import PackedRows
from .kernels.state_conv import Convolution, PackedStates, convolve_rows, convolve_step
from .mamba_mixing import MambaMixing
from .state_rows import Mixing, StateRows


class TritonStateRows(StateRows):
    """See StateRows."""

    block_tokens = 4096  # as many as a CUDA graph has

    @cached_property
    def _packed(self) -> PackedStates:
        assert self._rows
        ids, positions, _, ends, *_ = self._rows
        places = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        return PackedStates(self.states, ends, positions, torch.searchsorted(ends, places, right=True) - 1)

    @cached_property
    def _in_chunks(self) -> PackedRows:
        assert self._rows
        return PackedRows(self._rows.ends, len(self._rows.ids), self._rows.longest)

    def mix(self, mixing: Mixing, given: Sequence[Tensor], state: LayerState, dtype: torch.dtype) -> Tensor:
        if isinstance(mixing, MambaMixing):
            return self._mamba(mixing, given[0], state, dtype)
        assert isinstance(mixing, DeltaMixing), "a kind of layer that has kernels"
        return self._delta_rule(mixing, given[0], given[1], state, dtype)

    def _mamba(self, mixing: MambaMixing, given: Tensor, state: LayerState, dtype: torch.dtype) -> Tensor:
        kind, recurrence, (mixed, gates) = mixing.kind, mixing.recurrence, mixing.columns
        sizes = mamba_scan.MambaSizes(
            heads=kind.head_num,
            head_size=kind.size_per_head,
            groups=kind.group_num,
            memory_size=kind.state_size,
            step_at=kind.inter_size + kind.channels,
            least_step=kind.least_step,
            step_bias=mixing.step_bias,
            decay=recurrence.decay,
            skip=recurrence.skip,
        )
        convolved = self._convolve(given, Convolution(mixing.conv, mixing.conv_bias, mixed), state.past)
        if self.is_packed:
            is_exact = dtype == torch.float32
            found = mamba_scan.scan(given, convolved, sizes, state.memory, self._packed, is_exact)
        else:
            found = mamba_scan.step(given, convolved, sizes, state.memory, self.states)
        gate = Gate(gates, kind.group_num if mixing.norm else 1, mixing.norm, kind.has_norm_before_gate)
        return gate_groups(found, given, gate, dtype)

    def _delta_rule(
        self, mixing: DeltaMixing, given: Tensor, rates: Tensor, state: LayerState, dtype: torch.dtype
    ) -> Tensor:
        kind, (mixed, gates, learnt, forgotten) = mixing.kind, mixing.columns
        sizes = delta_scan.DeltaSizes(
            key_heads=kind.key_head_num,
            heads=kind.value_head_num,
            key_size=kind.key_size,
            value_size=kind.value_size,
            learnt=learnt,
            forgotten=forgotten,
            step_bias=mixing.step_bias,
            decay=mixing.decay,
        )
        convolved = self._convolve(given, Convolution(mixing.conv, None, mixed), state.past)
        if self.is_packed:
            is_exact = dtype == torch.float32
            found = delta_scan.scan(rates, convolved, sizes, state.memory, self._packed, self._in_chunks, is_exact)
        else:
            found = delta_scan.step(rates, convolved, sizes, state.memory, self.states)
        return gate_groups(found, given, Gate(gates, kind.value_head_num, mixing.norm, is_behind=True), dtype)

    def _convolve(self, given: Tensor, conv: Convolution, past: Tensor) -> Tensor:
        if self.is_packed:
            return convolve_rows(given, conv, past, self._packed)
        return convolve_step(given, conv, past, self.states)
