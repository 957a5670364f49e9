"""The rows of the batch whose output must follow a grammar, and the masking of their logits.

A row's mask depends on its last token, which the host must know. Where it knows the tokens before a step, as on a CPU,
a thread computes the masks while the network runs, unless they take less time than handing them over. Where steps are
launched ahead, as on a GPU, the host reads the last tokens when the next pass of the network is launched already, and
computes the masks while the GPU computes the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from torch import Tensor

from ..cache.sizing import upload
from ..grammar.masks import Bits, RowMasks, mask_bytes
from ..ops.ops import Ops
from ..scheduling.sequence import Sequence
from .sampling import NOT_FINITE

_WORTH_ROWS = 4  # with a grammar: a mask takes some 20 us, and a thread that wakes up 100 us of the engine's own
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
        self._thread: ThreadPoolExecutor | None = None  # made for the first row with a grammar
        self._begun: Future[Tensor] | None = None
        self._set_owners([])

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def begin(self, owners: Several[tuple[Sequence, int]] | None, is_known: bool) -> None:
        """Begin a step whose logits are not computed yet.

        Args:
            owners: sequence and beam in each slot; None: those of the last step.
            is_known: whether the sequences have all their tokens, so that the masks can be computed meanwhile.
        """
        self._drop_begun()
        if owners is not None:
            self._set_owners(owners)
        if is_known and len(self._sequences) >= _WORTH_ROWS:
            self._thread = self._thread or ThreadPoolExecutor(1, "masks")
            self._begun = self._thread.submit(self._compute, (), self._new_bits())

    def _set_owners(self, owners: Several[tuple[Sequence, int]]) -> None:
        guided = [(slot, row, row.guided) for slot, (row, _) in enumerate(owners) if row.guided]
        self._sequences = [row for _, row, _ in guided]
        self._masks = RowMasks([row for _, _, row in guided], self._vocab_size)
        self._slots = np.array([slot for slot, _, _ in guided], np.int64)
        # None: every slot has a grammar.
        self._index = None if len(guided) == len(owners) else upload(self._slots, self._device)

    def _drop_begun(self) -> None:
        """Wait for masks that were begun for a step that has failed; a row is never used by two threads."""
        if self._begun:
            wait([self._begun])
            self._begun = None

    def _new_bits(self) -> Tensor:
        """Allocate the masks, uint8 [rows with a grammar, mask_bytes], where a GPU copies them without waiting."""
        shape = len(self._sequences), mask_bytes(self._vocab_size)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _compute(self, pending: Pending, bits: Tensor) -> Tensor:
        """Compute the masks behind ``pending`` tokens."""
        last = [[step[row] for step in pending if row in step] for row in self._sequences]
        known = [row.beams[0].tokens for row in self._sequences]
        self._masks.compute(zip(known, last, strict=True), bits.numpy())
        return bits

    def _take(self, pending: Pending) -> Tensor:
        """Give the masks of this step: those that were begun, or those behind ``pending`` tokens."""
        begun, self._begun = self._begun, None
        return begun.result() if begun else self._compute(pending, self._new_bits())

    def keep(self, logits: Tensor, pending: Pending) -> Tensor:
        """Mask the tokens that a row's grammar does not allow: fp32 [N, V] of a slot each, which may be overwritten."""
        bits = self._take(pending)
        return self._ops.keep_allowed(logits, self._index, bits.to(self._device, non_blocking=True))

    def choose(self, logits: Tensor, tokens: Tensor, pending: Pending) -> Tensor:
        """Choose each row's argmax among the tokens that its grammar allows.

        Args:
            logits: fp32 [N, V], which may be overwritten.
            tokens: int64 [N], the argmax of each row; NOT_FINITE stays.
            pending: see Pending.

        Returns:
            int64 [N].
        """
        if self._device.type == "cpu":
            return self._correct(logits, tokens, self._take(pending).numpy())
        return torch.where(tokens == NOT_FINITE, NOT_FINITE, self.keep(logits, pending).argmax(dim=-1))

    def _correct(self, logits: Tensor, tokens: Tensor, bits: Bits) -> Tensor:
        """Look for another token only in rows whose argmax is not allowed."""
        chosen, values = tokens.numpy().copy(), logits.numpy()
        own = chosen[self._slots]
        is_allowed = bits[np.arange(len(own)), own >> 3] >> (own & 7) & 1
        for row in np.flatnonzero((is_allowed == 0) & (own != NOT_FINITE)).tolist():
            allowed = np.unpackbits(bits[row], count=self._vocab_size, bitorder="little")
            ids = np.flatnonzero(allowed.view(np.bool_))
            slot = self._slots[row]
            chosen[slot] = ids[values[slot][ids].argmax()]
        return torch.from_numpy(chosen)
