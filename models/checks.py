"""Values that a file brought: each is taken as what it must be, or refused by the error of the layer that reads it."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

Refusal = Callable[[str, str], Exception]
"""Makes the exception of the calling layer out of a problem (where, what was found, what is legal) and a hint (what to
do next)."""
MOST = 1 << 48
"""Of any size or place: they can be multiplied and counted in."""
_SHOWN = 200
_MOST_AXES = 16


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``, both legal; where ``is_above``, ``least`` itself is not. NaN never is."""

    least: float = -inf
    most: float = inf
    is_above: bool = False

    def __contains__(self, number: float) -> bool:
        return (self.least < number if self.is_above else self.least <= number) and number <= self.most

    def __str__(self) -> str:
        return f"{'above' if self.is_above else 'at least'} {self.least:.15g} and at most {self.most:.15g}"


class Checks:
    """Takes values; ``where`` is always their file and key.

    Args:
        error: makes the exception that is raised.
    """

    def __init__(self, error: Refusal) -> None:
        self._error = error

    def whole(self, value: Any, where: str, least: int = 0) -> int:
        """Take a count, a place or an id."""
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MOST:
            raise self._error(f"{where} is {quoted(value)}, not a whole number from {least} on", "")
        return value

    def positive(self, value: Any, where: str, hint: str = "") -> int:
        """Take a size; the hint says what else may be wrong."""
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(f"{where} is {quoted(value)}, not a positive number", hint)
        return value

    def bounded(self, value: Any, where: str, most: int, hint: str = "") -> int:
        """Take a size of at most this: what is listed or computed of it ends."""
        result = self.positive(value, where, hint)
        if result > most:
            raise self._error(f"{where} is {quoted(value)}, which no model has", f"the most is {most:,}")
        return result

    def number(self, value: Any, where: str) -> float:
        """Take a finite number."""
        try:
            result = float(value)
        except (TypeError, ValueError, OverflowError):
            result = float("nan")
        if not isfinite(result):
            raise self._error(f"{where} is {quoted(value)}, not a number", "")
        return result

    def above_zero(self, value: Any, where: str) -> float:
        """Take a number above 0."""
        result = self.number(value, where)
        if result <= 0:
            raise self._error(f"{where} is {shown(value)}, not a number above 0", "")
        return result

    def epsilon(self, value: Any, where: str) -> float:
        """Take what a norm adds to a variance."""
        result = self.number(value, where)
        if not 0 < result < 1:
            raise self._error(f"{where} is {quoted(value)}", "the epsilon of a norm is above 0 and below 1")
        return result

    def sizes(self, value: Any, where: str) -> tuple[int, ...]:
        """Take a shape or a place in one: a few whole numbers."""
        if not isinstance(value, (list, tuple)) or len(value) > _MOST_AXES:
            raise self._error(f"{where} is {quoted(value)}, not a list of sizes", "")
        return tuple(self.whole(each, where) for each in value)

    def text(self, value: Any, where: str) -> str:
        """Take a text."""
        if not isinstance(value, str):
            raise self._error(f"{where} is {quoted(value)}, not a text", "")
        return value

    def entries(self, value: Any, where: str) -> list[Any]:
        """Take a list."""
        if not isinstance(value, (list, tuple)):
            raise self._error(f"{where} is {quoted(value)}, not a list", "")
        return list(value)


def shown(value: Any) -> str:
    """Show a value without quotes."""
    return value[:_SHOWN] if isinstance(value, str) else reprlib.repr(value)


def quoted(value: Any) -> str:
    """Show a value as it would be written, a word in quotes."""
    return repr(value[:_SHOWN]) if isinstance(value, str) else reprlib.repr(value)
