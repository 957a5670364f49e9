"""Where a row is in its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher


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
        end_ids: those of them that are in the vocabulary.
        matcher: of the library, behind the tokens that were consumed.
        has_ended: whether a token has ended the row, and every token may follow.
        problem: why the grammar cannot be followed any further; empty: it can.
    """

    def __init__(self, grammar: Grammar, end_ids: Iterable[int]) -> None:
        self._grammar = grammar
        self.end_ids = sorted(token for token in end_ids if token < grammar.vocab_size)
        self.problem = ""
        self._begin()

    def _begin(self) -> None:
        self.matcher = self._grammar.matcher.deep_copy()
        self._followed, self.has_ended = 0, False

    def follow(self, tokens: Sequence[int], pending: Sequence[int]) -> int | None:
        """Follow the row's tokens, of which the last are ``pending``; fewer than before: it was begun again.

        Returns:
            The last new token, which the matcher is still to consume; None: there is none.
        """
        if len(tokens) + len(pending) < self._followed:
            self._begin()
        last, known = None, len(tokens)
        for token in (*tokens[self._followed :], *pending[max(0, self._followed - known) :]):
            if last is not None:
                self.matcher.consume_token(last)
            # A token of numbers that are not finite is negative; such a row fails anyway.
            self.has_ended = self.has_ended or token < 0 or token in self.end_ids
            last = None if self.has_ended else token
            self._followed += 1
        return last

    def check(self) -> None:
        """Note why the matcher has failed, if it has."""
        if self.matcher.is_error():
            self.problem = self.matcher.get_error()
