"""Stop strings in a text that comes piece by piece."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes a text on up to the first stop string; no part of one is passed on.

    Args:
        words: that end the text.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words, self._held = tuple(words), ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """Return what may be passed on, and the stop string that the piece has completed, if any."""
        if not self._words:
            return piece, None
        text = self._held + piece
        found = [(place, word) for word in self._words if (place := text.find(word)) >= 0]
        if found:
            # The one that is complete first, whatever pieces the text comes in; of several the longest.
            place, word = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
            self._held = ""
            return text[:place], word
        kept = max(_overlap(text, word) for word in self._words)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def rest(self) -> str:
        """Return what was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """Return how many characters at the end of a text begin a word."""
    longest = min(len(text), len(word) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(word[:count])), 0)
