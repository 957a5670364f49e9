"""The states of rows that run drafts: they stay as they are until it is known which tokens were right.

A state has no entry for each token that the next step could overwrite. So what a layer's products gave is kept, which
is little beside a state; and the tokens that go on are run on the states by it, without the products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..arrays import upload
from ..cache.states import LayerState
from .packed_rows import Rows
from .state_rows import Mixing, StateRows


class DraftedStates(StateRows, ABC):
    """See StateRows; those of rows of one token, which have no draft, go on at once.

    Args:
        states: int64 [B], on the device.
        rows: packed rows.
    """

    def __init__(self, states: Tensor, rows: Rows) -> None:
        super().__init__(states, rows)
        self._ran = list[tuple[Mixing, Sequence[Tensor], LayerState, torch.dtype]]()

    def mix(self, mixing: Mixing, given: Sequence[Tensor], state: LayerState, dtype: torch.dtype) -> Tensor:
        """See StateRows."""
        self._ran.append((mixing, given, state, dtype))
        return super().mix(mixing, given, state, dtype)

    @abstractmethod
    def settle(self, counts: Tensor) -> None:
        """Let the states of the other rows go on by the first tokens of each, int32 [B], on the device."""


class TorchDraftedStates(DraftedStates):
    """See DraftedStates; the host knows the rows' lengths."""

    def __init__(self, states: Tensor, rows: Rows) -> None:
        super().__init__(states, rows)
        self._drafted, lengths = rows, self._lengths
        self._waiting = np.flatnonzero(lengths > 1)
        self._others = upload(np.flatnonzero(lengths == 1), states.device)

    def write(self, part: Tensor, content: Tensor) -> None:
        """See StateRows."""
        part[self.states[self._others]] = content[self._others]

    def settle(self, counts: Tensor) -> None:
        """See DraftedStates."""
        told, starts = counts.cpu().numpy(), self._drafted.ends[:-1].tolist()
        settled = self._waiting[told[self._waiting] > 0]  # padding is not
        if not len(settled):
            return
        lengths = told[settled].tolist()
        tokens = [starts[row] + np.arange(count) for row, count in zip(settled, lengths, strict=True)]
        places = upload(np.concatenate(tokens), self.states.device)
        ends = upload(np.cumsum([0, *lengths]).astype(np.int32), self.states.device)
        ids, positions, slots = (each[places] for each in self._drafted[:3])
        right = Rows(ids, positions, slots, ends, lengths)
        rows = StateRows(self.states[upload(settled, self.states.device)], right)
        for mixing, given, state, _ in self._ran:
            mixing.mix(rows, [each[places] for each in given], state)
