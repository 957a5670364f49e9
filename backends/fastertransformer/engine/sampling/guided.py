"""The rows of the batch whose output must follow a grammar, and the masking of their logits.

A row's mask depends on its last token, which the host must know. Where steps are launched ahead, as on a GPU, the host
reads the last tokens when the next pass of the network is launched already, and computes the masks while the GPU
computes the logits. On a CPU it computes them behind the pass: a thread that did so meanwhile would take a core from
one of the pass's threads, for which all others would wait. There it knows each row's argmax by then, which mostly
needs no mask: the grammar allows it, or forces another token.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several

import numpy as np
import torch
from torch import Tensor

from ..cache.sizing import upload
from ..grammar.masks import RowMasks, mask_bytes
from ..ops.ops import Ops
from ..scheduling.sequence import Sequence
from .sampling import NOT_FINITE

Pending = Several[Mapping[Sequence, int]]  # tokens that were chosen and that no sequence has yet, the oldest step first


class GuidedRows:
    """The rows with a grammar among those of the batch.

    Args:
        ops: mask the logits.
        vocab_size: of the model.
        device: where the logits are.
    """

    def __init__(self, ops: Ops, vocab_size: int, device: torch.device) -> None:
        self._ops, self._vocab_size, self._device = ops, vocab_size, device
        self.set_owners([])

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def set_owners(self, owners: Several[tuple[Sequence, int]]) -> None:
        """Set sequence and beam in each slot."""
        guided = [(slot, row, row.guided) for slot, (row, _) in enumerate(owners) if row.guided]
        self._sequences = [row for _, row, _ in guided]
        self._masks = RowMasks([row for _, _, row in guided], self._vocab_size)
        self._slots = [slot for slot, _, _ in guided]
        # None: every slot has a grammar.
        self._index = None if len(guided) == len(owners) else upload(np.array(self._slots, np.int64), self._device)
        # A GPU copies it without waiting, and has done so when the host knows the tokens of the next step's masks.
        shape = len(guided), mask_bytes(self._vocab_size)
        self._bits = torch.empty(shape, dtype=torch.uint8, pin_memory=bool(guided) and self._device.type == "cuda")

    def _follow(self, pending: Pending) -> None:
        """Follow the tokens of each row, ``pending`` ones too."""
        last = [[step[row] for step in pending if row in step] for row in self._sequences]
        known = [row.beams[0].tokens for row in self._sequences]
        self._masks.follow(zip(known, last, strict=True))

    def keep(self, logits: Tensor, pending: Pending) -> Tensor:
        """Mask the tokens that a row's grammar does not allow: fp32 [N, V] of a slot each, which may be overwritten."""
        self._follow(pending)
        self._masks.compute(self._bits.numpy())
        return self._ops.keep_allowed(logits, self._index, self._bits.to(self._device, non_blocking=True))

    def choose(self, logits: Tensor, tokens: Tensor, pending: Pending) -> Tensor:
        """Choose each row's argmax among the tokens that its grammar allows.

        Args:
            logits: fp32 [N, V], which may be overwritten.
            tokens: int64 [N], the argmax of each row; NOT_FINITE stays.
            pending: see Pending.

        Returns:
            int64 [N]; ``tokens`` itself where each row has its argmax.
        """
        if self._device.type == "cpu":
            return self._choose_on_host(logits, tokens, pending)
        return torch.where(tokens == NOT_FINITE, NOT_FINITE, self.keep(logits, pending).argmax(dim=-1))

    def _choose_on_host(self, logits: Tensor, tokens: Tensor, pending: Pending) -> Tensor:
        """Compute the masks of those rows alone whose argmax may not follow."""
        self._follow(pending)
        chosen = tokens.tolist()
        settled = self._masks.settle([chosen[slot] for slot in self._slots])
        if rows := {row for row, token in enumerate(settled) if token is None}:
            bits, values = self._bits.numpy(), logits.numpy()
            self._masks.compute(bits, rows)
            for row in rows:
                allowed = np.unpackbits(bits[row], count=self._vocab_size, bitorder="little")
                ids = np.flatnonzero(allowed.view(np.bool_))
                settled[row] = int(ids[values[self._slots[row]][ids].argmax()])
        is_changed = False
        for slot, token in zip(self._slots, settled, strict=True):
            is_changed, chosen[slot] = is_changed or chosen[slot] != token, token
        return torch.tensor(chosen) if is_changed else tokens
