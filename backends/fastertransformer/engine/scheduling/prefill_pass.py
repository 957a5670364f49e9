"""Which sequences share a prefill pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..rows.sequence import Sequence
from .tuning import TUNING


@dataclass(frozen=True)
class _Sizes:
    """What the contexts of one pass come to.

    Rows that continue what is in the cache already are padded to the longest on the device, and so is that.

    Attributes:
        most: tokens that one pass runs.
        tokens: of rows that continue nothing, and of those that decode.
        continued: rows that continue something.
        longest: the most tokens that one of these runs.
        held: the most tokens that one of these continues.
    """

    most: int
    tokens: int = 0
    continued: int = 0
    longest: int = 0
    held: int = 0

    def plus(self, sequence: Sequence) -> _Sizes:
        """Count the context of one more sequence."""
        found = sequence.reservation.tokens_found
        before, tokens = sequence.start + found, sequence.tokens_to_run(found)
        if self.most <= TUNING.pass_tokens_cpu and sequence.needs_hidden:
            tokens *= TUNING.scored_token_cost
        if not before:
            return replace(self, tokens=self.tokens + tokens)
        longest, held = max(self.longest, tokens), max(self.held, before)
        return replace(self, continued=self.continued + 1, longest=longest, held=held)

    @property
    def is_one_pass(self) -> bool:
        """Whether one pass runs them all."""
        padded, held = self.continued * self.longest, self.continued * self.held
        return self.tokens + padded <= self.most and held <= TUNING.held_tokens


def most_tokens(device: torch.device) -> int:
    """Return how many tokens one prefill pass runs on a device, unless it runs one row alone."""
    return min(TUNING.pass_tokens, TUNING.pass_tokens_cpu) if device.type == "cpu" else TUNING.pass_tokens


class PrefillPass:
    """The sequences of one prefill pass, as they are chosen.

    Args:
        decoding: rows that decode beside it.
        most: see most_tokens.

    Attributes:
        sequences: that were chosen.
    """

    def __init__(self, decoding: int, most: int) -> None:
        self._sizes = _Sizes(most, decoding)
        self._is_closed = False
        self.sequences: list[Sequence] = []

    def takes(self, sequence: Sequence) -> bool:
        """Return whether the pass has room for one more sequence; the first one always has a pass."""
        if not self.sequences:
            return True
        is_alone = self._is_closed or _is_prefilled_alone(sequence)
        return not is_alone and self._sizes.plus(sequence).is_one_pass

    def add(self, sequence: Sequence) -> None:
        """Choose a sequence, which has its pages."""
        self._sizes = self._sizes.plus(sequence)
        self._is_closed |= _is_prefilled_alone(sequence)
        self.sequences.append(sequence)


def _is_prefilled_alone(sequence: Sequence) -> bool:
    """Return whether it is prefilled alone: one that has failed, a session, preempted beams, a last chunk."""
    is_special = sequence.session_row is not None or (sequence.count > 0 and sequence.width > 1)
    return is_special or sequence.has_failed or bool(sequence.chunks)
