"""Where a row is in its grammar, and which tokens may follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = npt.NDArray[np.uint8]  # a bit for each token, the lowest of each byte first
_WORD_BYTES = 4


def mask_bytes(vocab_size: int) -> int:
    """Give the bytes of a row's bits: whole words, with at least a bit more than there are tokens."""
    return _WORD_BYTES * (vocab_size // (8 * _WORD_BYTES) + 1)


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar.

    Attributes:
        matcher: at its beginning.
        vocab_size: of the model.
    """

    matcher: LLMatcher
    vocab_size: int

    def begin(self, end_ids: Iterable[int]) -> GuidedRow:
        """Begin a row that some tokens may end."""
        return GuidedRow(self, end_ids)


class GuidedRow:
    """One row and its grammar.

    Args:
        grammar: that it must follow.
        end_ids: tokens that end the row, some of which may be outside the vocabulary.

    Attributes:
        problem: why the grammar cannot be followed any further; empty: it can.
    """

    def __init__(self, grammar: Grammar, end_ids: Iterable[int]) -> None:
        # The bit behind those of the tokens says that the text may be complete.
        self._grammar, self._complete = grammar, grammar.vocab_size
        self._end_ids = sorted(token for token in end_ids if token < grammar.vocab_size)
        self.problem = ""
        self._begin()

    def _begin(self) -> None:
        self._matcher = self._grammar.matcher.deep_copy()
        self._followed, self._has_ended = 0, False

    def follow(self, tokens: Sequence[int], pending: Sequence[int]) -> None:
        """Follow the row's tokens, of which the last are ``pending``; fewer than before: it was begun again."""
        if len(tokens) + len(pending) < self._followed:
            self._begin()
        known = len(tokens)
        for token in (*tokens[self._followed :], *pending[max(0, self._followed - known) :]):
            # A token of numbers that are not finite is negative; such a row fails anyway.
            self._has_ended = self._has_ended or token < 0 or token in self._end_ids
            if not self._has_ended and not self._matcher.consume_token(token):
                self.problem = self._matcher.get_error()
            self._followed += 1

    def fill(self, bits: Bits) -> None:
        """Set the bits of the tokens that may follow, uint8 [mask_bytes]: every token, once the row has ended."""
        if self._has_ended:
            bits[:] = 0xFF
            return
        try:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if self._matcher.is_error():
                self.problem = self._matcher.get_error()
        except BaseException as error:  # a failure inside the library is no Exception
            self.problem = str(error)
        is_complete = bits[self._complete >> 3] >> (self._complete & 7) & 1
        for token in self._end_ids:
            bit = np.uint8(1 << (token & 7))
            bits[token >> 3] = bits[token >> 3] | bit if is_complete else bits[token >> 3] & ~bit
