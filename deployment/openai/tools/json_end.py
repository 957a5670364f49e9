"""Where a JSON object ends that comes in pieces."""

from __future__ import annotations


class JsonEnd:
    """Looks for the end of a JSON object that comes in pieces.

    Attributes:
        depth: of brackets that are open.
        is_reached: whether the end was found.
    """

    def __init__(self) -> None:
        self.depth, self.is_reached = 0, False
        self._is_in_text = self._is_escaped = False

    def find(self, piece: str) -> int:
        """Return how many characters of a piece belong to the object."""
        for index, letter in enumerate(piece):
            if self._is_in_text:
                self._is_in_text = letter != '"' or self._is_escaped
                self._is_escaped = letter == "\\" and not self._is_escaped
            elif letter == '"':
                self._is_in_text = True
            elif letter in "{[":
                self.depth += 1
            elif letter in "}]":
                self.depth -= 1
                if not self.depth:
                    self.is_reached = True
                    return index + 1
        return len(piece)
