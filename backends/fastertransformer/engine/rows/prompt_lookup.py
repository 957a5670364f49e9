"""Drafts by prompt lookup: what followed, earlier in a row's prompt or answer, on the tokens that it ends with now.

No weights and no GPU are needed. Summaries, edits of code and answers from a text repeat much of their prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays import Array

_SIZES = (4, 2)  # tokens that must have come before; the longer match is tried first
_REACH = 16384  # tokens of a prompt, its last ones, that are looked through: more would take the step's time


class PromptLookup:
    """The places of all short sequences of tokens in a row.

    Args:
        prompt: int64 [n].

    Attributes:
        tokens: of the prompt, and of the answer so far.
        begin: where the answer begins.
    """

    def __init__(self, prompt: Array) -> None:
        self.tokens: list[int] = prompt[-_REACH:].tolist()
        self.begin = len(self.tokens)
        # By the last tokens before it: the latest place at which something followed on these.
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in _SIZES]
        self._note(0)

    def _note(self, known: int) -> None:
        """Note what follows on each token from ``known`` on."""
        for size, places in zip(_SIZES, self._places, strict=True):
            first = max(known, size)
            before = zip(*(self.tokens[first - size + at : -size + at] for at in range(size)), strict=False)
            places.update(zip(before, range(first, len(self.tokens)), strict=False))

    def follow(self, generated: Sequence[int]) -> None:
        """Note the tokens that the row has generated so far; those that are known already stay."""
        known = len(self.tokens)
        self.tokens.extend(generated[known - self.begin :])
        if known < len(self.tokens):
            self._note(known)

    def draft(self, most: int) -> list[int]:
        """Return up to ``most`` tokens that may come next."""
        tokens, count = self.tokens, len(self.tokens)
        for size, places in zip(_SIZES, self._places, strict=True):
            if place := places.get(tuple(tokens[-size:])):
                period = count - place  # what ends the row comes again and again, where the draft is longer
                return [tokens[place + at % period] for at in range(most)]
        return []
