"""The rows of the batch whose output must follow a grammar, and the masking of their logits.

A row's mask depends on its last token, which the host must know. Where steps are launched ahead, as on a GPU, the host
reads the last tokens when the next pass of the network is launched already, and computes the masks while the GPU
computes the logits. On a CPU it computes them after the pass: a thread that did so meanwhile would take a core from
one of the pass's threads, for which all others would wait. There it knows each row's argmax by then, which mostly
needs no mask: the grammar allows it, or forces another token. And where a grammar allows few tokens, it draws among
these: sooner than the masked row is drawn from.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several

import numpy as np
import torch
from torch import Tensor

from ..arrays import upload
from ..grammar.masks import RowMasks, mask_bytes
from ..ops.logits import LEAST_ALLOWED, NOT_FINITE, draw_among
from ..ops.ops import Ops
from ..rows.sequence import Sequence

Pending = Several[Mapping[Sequence, int]]  # tokens that were chosen and that no sequence has yet, the oldest step first


class _Values:
    """Logits on the host, fp32 [N, V], of which few are read: sooner than by torch or numpy."""

    def __init__(self, logits: Tensor) -> None:
        self._numbers, self._width = logits.contiguous().numpy().data.cast("B").cast("f"), logits.shape[1]

    def of(self, slot: int, tokens: Iterable[int]) -> list[float]:
        """Read those of some tokens of a slot."""
        first = slot * self._width
        return [self._numbers[first + token] for token in tokens]


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

    @property
    def is_on_host(self) -> bool:
        """Whether the host reads logits and tokens without waiting."""
        return self._device.type == "cpu"

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def set_owners(self, owners: Several[tuple[Sequence, int]]) -> None:
        """Set sequence and beam in each slot."""
        self._has_followed = False  # the tokens that were chosen last
        guided = [(slot, row, row.guided) for slot, (row, _) in enumerate(owners) if row.guided]
        self._sequences = [row for _, row, _ in guided]
        self._slots = [slot for slot, _, _ in guided]
        # None: every slot has a grammar.
        self._index = None if len(guided) == len(owners) else upload(np.array(self._slots, np.int64), self._device)
        # A GPU copies it without waiting, and has done so when the host knows the tokens of the next step's masks.
        shape = len(guided), mask_bytes(self._vocab_size)
        self._bits = torch.empty(shape, dtype=torch.uint8, pin_memory=bool(guided) and self._device.type == "cuda")
        self._masks = RowMasks([row for _, _, row in guided], self._vocab_size, self._bits.numpy())
        self._drawn = [
            (row, slot) for row, slot in enumerate(self._slots) if self._sequences[row].sampling.is_drawn_from_all
        ]

    def _follow(self, pending: Pending) -> None:
        """Follow the tokens of each row, ``pending`` ones too."""
        if self._has_followed:  # without a look at each row, which the pass has driven out of the processor's cache
            return
        last = [[step[row] for step in pending if row in step] for row in self._sequences]
        known = [row.beams[0].tokens for row in self._sequences]
        self._masks.follow(zip(known, last, strict=True))

    def keep(self, logits: Tensor, pending: Pending) -> Tensor:
        """Mask the tokens that a row's grammar does not allow: fp32 [N, V] of a slot each, which may be overwritten."""
        self._follow(pending)
        self._masks.compute()
        self._has_followed = False
        return self._ops.keep_allowed(logits, self._index, self._bits.to(self._device, non_blocking=True))

    def keep_or_draw(
        self, logits: Tensor, pending: Pending, uniform: Mapping[int, float], scales: Several[float]
    ) -> tuple[Tensor, dict[int, int]]:
        """Draw the tokens of rows whose grammars allow few, on the host, and mask those of the other rows; see keep.

        Args:
            logits: fp32 [N, V], which may be overwritten.
            pending: see Pending.
            uniform: a random number in [0, 1) for each sampled slot.
            scales: by which the logits of each slot are multiplied first.

        Returns:
            The logits; and by slot the tokens that were drawn, whose logits are not masked.
        """
        self._follow(pending)
        self._masks.compute()
        values, drawn = _Values(logits), dict[int, int]()
        for row, slot in self._drawn:
            if few := self._masks.find_few(row):
                scale = scales[slot]
                # Rounded to fp32, as torch multiplies.
                own = array("f", [max(value, LEAST_ALLOWED) * scale for value in values.of(slot, few)])
                drawn[slot] = few[draw_among(own, uniform[slot])]
        if not drawn:
            return self._ops.keep_allowed(logits, self._index, self._bits), drawn
        if rest := [row for row, slot in enumerate(self._slots) if slot not in drawn]:
            index = torch.tensor([self._slots[row] for row in rest])
            logits = self._ops.keep_allowed(logits, index, self._bits[rest])
        return logits, drawn

    def take(self, tokens: Several[int]) -> None:
        """Follow the tokens that were chosen for all slots, each of which is its row's next one."""
        self._masks.take((row, tokens[slot]) for row, slot in enumerate(self._slots))
        self._has_followed = True

    def choose(self, logits: Tensor, tokens: Tensor, pending: Pending) -> Tensor:
        """Choose each row's argmax among the tokens that its grammar allows.

        Args:
            logits: fp32 [N, V], which may be overwritten.
            tokens: int64 [N], the argmax of each row; NOT_FINITE stays.
            pending: see Pending.

        Returns:
            int64 [N]; ``tokens`` itself where each row has its argmax.
        """
        if self.is_on_host:
            return self._choose_on_host(logits, tokens, pending)
        return torch.where(tokens == NOT_FINITE, NOT_FINITE, self.keep(logits, pending).argmax(dim=-1))

    def _choose_on_host(self, logits: Tensor, tokens: Tensor, pending: Pending) -> Tensor:
        """Compute the masks of those rows alone whose argmax may not follow."""
        self._follow(pending)
        chosen = tokens.tolist()
        settled = self._masks.resolve_without_mask([chosen[slot] for slot in self._slots])
        if rows := {row for row, token in enumerate(settled) if token is None}:
            self._masks.compute(rows)
            values = _Values(logits)
            best = {row: self._argmax(row, logits, values) for row in rows}
            self._masks.take(best.items())
            settled = [best.get(row, token) for row, token in enumerate(settled)]
        self._has_followed = True
        is_changed = False
        for slot, token in zip(self._slots, settled, strict=True):
            if token is not None and chosen[slot] != token:
                is_changed, chosen[slot] = True, token
        return torch.tensor(chosen) if is_changed else tokens

    def _argmax(self, row: int, logits: Tensor, values: _Values) -> int:
        """Return the argmax of a row among the tokens that its mask allows."""
        slot = self._slots[row]
        if few := self._masks.find_few(row):
            own = values.of(slot, few)
            return few[own.index(max(own))]
        allowed = np.unpackbits(self._masks.bits[row], count=self._vocab_size, bitorder="little")
        ids = np.flatnonzero(allowed.view(np.bool_))
        return int(ids[logits.numpy()[slot][ids].argmax()])
