"""Which sequences share a prefill pass."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.block_manager import BlockManager
from ..rows.sequence import Sequence
from .paging import tokens_found, tokens_to_run

# Of one prefill pass, padding and the rows that decode in it included: bounds its memory and how long it delays others.
# A few tokens more would take another tile of every product.
_PREFILL_TOKENS = 4096
_HELD_TOKENS = 8 * _PREFILL_TOKENS  # that the rows of one pass continue, padding included


@dataclass(frozen=True)
class _Sizes:
    """What the contexts of one pass come to.

    Rows that continue what is in the cache already are padded to the longest on the device, and so is that.

    Attributes:
        tokens: of rows that continue nothing, and of those that decode.
        continued: rows that continue something.
        longest: the most tokens that one of these runs.
        held: the most tokens that one of these continues.
    """

    tokens: int = 0
    continued: int = 0
    longest: int = 0
    held: int = 0

    def plus(self, sequence: Sequence, blocks: BlockManager) -> _Sizes:
        """Count the context of one more sequence."""
        found = tokens_found(sequence, blocks)
        before, tokens = sequence.start + found, tokens_to_run(sequence, found)
        if not before:
            return _Sizes(self.tokens + tokens, self.continued, self.longest, self.held)
        return _Sizes(self.tokens, self.continued + 1, max(self.longest, tokens), max(self.held, before))

    @property
    def is_one_pass(self) -> bool:
        """Whether one pass runs them all."""
        padded, held = self.continued * self.longest, self.continued * self.held
        return self.tokens + padded <= _PREFILL_TOKENS and held <= _HELD_TOKENS


class PrefillPass:
    """The sequences of one prefill pass, as they are chosen.

    Args:
        decoding: rows that decode beside it.
        blocks: the cache's pages.

    Attributes:
        sequences: that were chosen.
    """

    def __init__(self, decoding: int, blocks: BlockManager) -> None:
        self._blocks, self._sizes = blocks, _Sizes(tokens=decoding)
        self._is_closed = False
        self.sequences: list[Sequence] = []

    def takes(self, sequence: Sequence) -> bool:
        """Say whether the pass has room for one more sequence; the first one always has a pass."""
        if not self.sequences:
            return True
        is_alone = self._is_closed or _is_prefilled_alone(sequence)
        return not is_alone and self._sizes.plus(sequence, self._blocks).is_one_pass

    def add(self, sequence: Sequence) -> None:
        """Choose a sequence, which has its pages."""
        self._sizes = self._sizes.plus(sequence, self._blocks)
        self._is_closed |= _is_prefilled_alone(sequence)
        self.sequences.append(sequence)


def _is_prefilled_alone(sequence: Sequence) -> bool:
    """Say whether no other sequence shares its prefill: of one that failed, a session, set-back beams, a last chunk."""
    is_special = sequence.session_row is not None or (sequence.count > 0 and sequence.width > 1)
    return is_special or sequence.isolate_until is not None or bool(sequence.chunks)
