"""What is between the products of layers with states, on an NVIDIA GPU: Triton's kernels; nothing waits for the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..cache.states import LayerState
from .delta_mixing import DeltaMixing
from .drafted_states import DraftedStates
from .kernels import delta_scan, mamba_scan
from .kernels.gated_norm import Gate, gate_groups
from .kernels.row_blocks import PackedRows
from .kernels.state_conv import Convolution, PackedStates, convolve_rows, convolve_step
from .mamba_mixing import MambaMixing
from .packed_rows import Rows
from .state_rows import Mixing, StateRows


class TritonStateRows(StateRows):
    """See StateRows."""

    block_tokens = 4096  # as many as a CUDA graph has
    _runs_drafts = False

    @cached_property
    def _packed(self) -> PackedStates:
        assert self._rows
        ids, positions, _, ends, *_ = self._rows
        places = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        of_tokens = torch.searchsorted(ends, places, right=True) - 1
        return PackedStates(self.states, ends, positions, of_tokens, ends[1:], ends[1:])

    @cached_property
    def _in_chunks(self) -> PackedRows:
        assert self._rows
        return PackedRows(self._rows.ends, len(self._rows.ids), self._rows.longest)

    def mix(self, mixing: Mixing, given: Sequence[Tensor], state: LayerState, dtype: torch.dtype) -> Tensor:
        found = self._run(mixing, given, state, dtype)
        if isinstance(mixing, MambaMixing):
            norm, kind = mixing.norm, mixing.kind
            gate = Gate(mixing.columns[1], kind.group_num if norm else 1, norm, kind.has_norm_before_gate)
        else:
            assert isinstance(mixing, DeltaMixing)
            gate = Gate(mixing.columns[1], mixing.kind.value_head_num, mixing.norm, is_behind=True)
        return gate_groups(found, given[0], gate, dtype)

    def _run(self, mixing: Mixing, given: Sequence[Tensor], state: LayerState, dtype: torch.dtype) -> Tensor:
        """Run convolution and recurrence -> fp32 [T, width]; the states go on."""
        if isinstance(mixing, MambaMixing):
            return self._mamba(mixing, given[0], state, dtype)
        assert isinstance(mixing, DeltaMixing), "a kind of layer that has kernels"
        return self._delta_rule(mixing, given[0], given[1], state, dtype)

    def _mamba(self, mixing: MambaMixing, given: Tensor, state: LayerState, dtype: torch.dtype) -> Tensor:
        kind, recurrence, (mixed, _) = mixing.kind, mixing.recurrence, mixing.columns
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
        if self._runs_drafts:
            return mamba_scan.run_drafts(given, convolved, sizes, state.memory, self._packed)
        if self.is_packed:
            is_exact = dtype == torch.float32
            return mamba_scan.scan(given, convolved, sizes, state.memory, self._packed, is_exact)
        return mamba_scan.step(given, convolved, sizes, state.memory, self.states)

    def _delta_rule(
        self, mixing: DeltaMixing, given: Tensor, rates: Tensor, state: LayerState, dtype: torch.dtype
    ) -> Tensor:
        kind, (mixed, _, learnt, forgotten) = mixing.kind, mixing.columns
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
        if self._runs_drafts:
            return delta_scan.run_drafts(rates, convolved, sizes, state.memory, self._packed)
        if self.is_packed:
            is_exact = dtype == torch.float32
            return delta_scan.scan(rates, convolved, sizes, state.memory, self._packed, self._in_chunks, is_exact)
        return delta_scan.step(rates, convolved, sizes, state.memory, self.states)

    def _convolve(self, given: Tensor, conv: Convolution, past: Tensor) -> Tensor:
        if self.is_packed:
            return convolve_rows(given, conv, past, self._packed)
        return convolve_step(given, conv, past, self.states)


class TritonDraftedStates(DraftedStates, TritonStateRows):
    """See DraftedStates; one CUDA graph may run the drafts, and another one settle them.

    Tokens are run one by one, as steps run them.
    """

    _runs_drafts = True

    def __init__(self, states: Tensor, rows: Rows) -> None:
        super().__init__(states, rows)
        self._goes_on = rows.ends[1:] - rows.ends[:-1] == 1  # at once
        self._packed = self._packed._replace(stops=torch.where(self._goes_on, rows.ends[1:], rows.ends[:-1]))

    def settle(self, counts: Tensor) -> None:
        """See DraftedStates."""
        starts = self._packed.ends[:-1]
        stops = torch.where(self._goes_on, starts, starts + counts)
        self._packed = self._packed._replace(lasts=stops, stops=stops)
        for ran in self._ran:
            self._run(*ran)
