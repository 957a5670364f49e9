"""The rows of the batch whose output must follow a grammar, and the masking of their logits.

A row's mask depends on its last token, which the host must know. It reads that token when the next pass of the network
is launched already, so a GPU computes logits while the host computes masks, and steps go on being launched ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several

import numpy as np
import torch
from torch import Tensor

from ..cache.sizing import upload
from ..grammar.guided_row import GuidedRow, mask_bytes
from ..scheduling.sequence import Sequence
from .sampling import keep_allowed


class GuidedRows:
    """The rows with a grammar among those of the batch.

    Args:
        vocab_size: of the model.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._rows: list[tuple[Sequence, GuidedRow]] = []
        self._slots: Tensor | None = None  # None: every slot has a grammar

    def __bool__(self) -> bool:
        return bool(self._rows)

    def set_owners(self, owners: Several[tuple[Sequence, int]]) -> None:
        """Set the row of each slot."""
        self._rows = [(row, row.guided) for row, _ in owners if row.guided]
        slots = [slot for slot, (row, _) in enumerate(owners) if row.guided]
        is_every = len(slots) == len(owners)
        self._slots = None if is_every else upload(np.array(slots, np.int64), self._device)

    def keep(self, logits: Tensor, pending: Several[Mapping[Sequence, int]]) -> Tensor:
        """Mask the tokens that a row's grammar does not allow.

        Args:
            logits: fp32 [N, V], those of one slot each.
            pending: the tokens that were chosen and that no sequence has yet, of each step, the oldest first.
        """
        bits = np.empty((len(self._rows), mask_bytes(self._vocab_size)), np.uint8)
        for (sequence, guided), row_bits in zip(self._rows, bits, strict=True):
            guided.follow(sequence.beams[0].tokens, [step[sequence] for step in pending if sequence in step])
            guided.fill(row_bits)
        return keep_allowed(logits, self._slots, upload(bits, self._device))
