"""Texts by key, of config.ini's sections and config.pbtxt's parameters: each is read as what it must be, or refused.

FasterTransformer ignores a key that it does not know, and so does this engine; but one that is nearly a key that is not
given is a typing error, and is said.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from .errors import EngineError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_NEAR = 0.85  # of difflib's measure: one letter in seven may be wrong


class Keys:
    """What is wrong with a value is said with the place and the key.

    Args:
        where: they stand.
        values: by key.
        error: is raised.
    """

    def __init__(self, where: str, values: Mapping[str, str], error: type[EngineError]) -> None:
        self._where, self._values, self._error = where, values, error
        self._known: set[str] = set()

    def find(self, key: str, kind: Callable[[str], _T]) -> _T | None:
        """Read a value, if there is one; ``kind`` understands it, or raises a ValueError that says what is legal."""
        self._known.add(key)
        if key not in self._values:
            return None
        text = self._values[key].strip()
        try:
            return kind(text)
        except ValueError as error:
            raise self._error(f"{self._where} {key} = {text} {error}") from None

    def get(self, key: str, kind: Callable[[str], _T], default: _T | None = None) -> _T:
        """Likewise, or the default; there must be a value where that is None."""
        value = self.find(key, kind)
        value = default if value is None else value
        if value is None:
            raise self._error(f"{self._where} has no {key}")
        return value

    def refuse(self, key: str, is_wrong: bool) -> None:
        """Refuse a value that describes what this engine does not do."""
        if is_wrong:
            what = f"{key} = {self._values[key].strip()}"
            raise self._error(f"{self._where} describes a network that this engine does not serve: {what}")

    def warn_of_near_misses(self) -> None:
        """Log each key that nobody has asked for, and that is nearly one which somebody has."""
        given = set(self._values)
        for key in sorted(given - self._known):
            for near in get_close_matches(key, self._known - given, n=1, cutoff=_NEAR):
                _log.warning("%s %s is ignored: did you mean %s?", self._where, key, near)


def whole(least: int) -> Callable[[str], int]:
    """Understand a whole number of at least that."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"is not a whole number of at least {least}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """Understand a length of time, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError("is not a number of seconds, 0 or more")
    return value


def fraction(is_one_legal: bool = False) -> Callable[[str], float]:
    """Understand a number above 0 and below 1."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0.0 < value <= 1.0 or (value == 1.0 and not is_one_legal):
            raise ValueError(f"is not a number above 0 and {'at most' if is_one_legal else 'below'} 1")
        return value

    return read


def one_of(meanings: Mapping[str, _T]) -> Callable[[str], _T]:
    """Understand some words, in any case."""
    known = {word.lower(): meaning for word, meaning in meanings.items()}

    def read(text: str) -> _T:
        if text.lower() not in known:
            raise ValueError(f"is none of {', '.join(meanings)}")
        return known[text.lower()]

    return read


COUNT, INDEX = whole(1), whole(0)
