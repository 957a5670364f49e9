"""Typed access to texts by key: the keys of a section of config.ini, or the parameters of a config.pbtxt.

FasterTransformer ignores a key that it does not know, and so does this package; but a key that is nearly a known one
which is not given is probably a typing error, and ``warn_of_near_misses`` logs it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from models.checks import Refusal

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_NEAR = 0.85  # of difflib's measure: one letter in seven may be wrong
_MOST_SHOWN, _MOST_DIGITS = 200, 19


class Values:
    """Texts by key, each read as what it must be or refused with its place and key.

    Args:
        where: file and section, or whatever else the keys stand in; every refusal begins with it.
        texts: by key.
        error: makes the exception that is raised.
        hint: what to do about a value that is not legal.

    Attributes:
        texts: by key, as they stand.
    """

    def __init__(self, where: str, texts: Mapping[str, str], error: Refusal, hint: str = "") -> None:
        self._where, self.texts, self._error, self._hint = where, texts, error, hint
        self._known: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.texts

    def find(self, key: str, kind: Callable[[str], _T]) -> _T | None:
        """Read a value, or return None where the key is not given.

        Args:
            key: of the value.
            kind: converts the text, or raises a ValueError that says what is legal.
        """
        self._known.add(key)
        if key not in self.texts:
            return None
        text = self.texts[key].strip()
        try:
            return kind(text)
        except ValueError as error:
            found = " and ".join(text[:_MOST_SHOWN].splitlines())  # a key that is given twice has several lines
            raise self._error(f"{self._where} {key} = {found} {error}", self._hint) from None

    def get(self, key: str, kind: Callable[[str], _T], default: _T | None = None) -> _T:
        """Read a value, or return the default where the key is not given; without a default the key is required."""
        value = self.find(key, kind)
        value = default if value is None else value
        if value is None:
            raise self._error(f"{self._where} has no {key}", self._hint)
        return value

    def refuse(self, key: str, is_wrong: bool) -> None:
        """Refuse a value that describes a network which the engine does not compute."""
        if is_wrong:
            what = f"{key} = {self.texts[key].strip()}"
            raise self._error(f"{self._where} describes a network that this engine does not serve: {what}", "")

    def refusal(self, problem: str, hint: str) -> Exception:
        """Return the exception for what is wrong with several values together."""
        return self._error(f"{self._where} {problem}", hint)

    def refuse_difference(self, key: str, other: Values) -> None:
        """Refuse a value that is another one in a section which must agree with this one."""
        if key in other and self.texts.get(key) != other.texts[key]:
            found = f"{self.texts.get(key)}, but {other._where} has {other.texts[key]}"
            raise self._error(f"{self._where} {key} = {found}: they must not differ", self._hint)

    def warn_of_near_misses(self) -> None:
        """Log each key that was never read and is nearly one that was looked for and is not given."""
        given = set(self.texts)
        for key in sorted(given - self._known):
            for near in get_close_matches(key, self._known - given, n=1, cutoff=_NEAR):
                _log.warning("%s %s is ignored: did you mean %s?", self._where, key, near)


def whole(least: int, most: int = 10**18) -> Callable[[str], int]:
    """Return a kind: a whole number of at least ``least`` and at most ``most``."""

    def read(text: str) -> int:
        digits = _first_line(text)
        if not (digits.isascii() and digits.isdecimal()) or len(digits) > _MOST_DIGITS or int(digits) < least:
            raise ValueError(f"is not a whole number of at least {least}")
        if int(digits) > most:
            raise ValueError(f"is more than any model has; the most is {most:,}")
        return int(digits)

    return read


def _number(legal: str, is_legal: Callable[[float], bool]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = float(_first_line(text))
        except ValueError:
            value = math.nan
        if not is_legal(value):
            raise ValueError(f"is not a number {legal}")
        return value

    return read


def fraction(is_one_legal: bool = False) -> Callable[[str], float]:
    """Return a kind: a number above 0 and below 1, or at most 1."""
    legal = f"above 0 and {'at most' if is_one_legal else 'below'} 1"
    return _number(legal, lambda value: 0 < value < 1 or (value == 1 and is_one_legal))


seconds = _number("of seconds, 0 or more", lambda value: 0 <= value < math.inf)
decimal = _number("of at least 0", lambda value: 0 <= value < math.inf)


def one_of(meanings: Mapping[str, _T]) -> Callable[[str], _T]:
    """Return a kind: one of some words, in upper or lower case."""
    known = {word.lower(): meaning for word, meaning in meanings.items()}

    def read(text: str) -> _T:
        if text.lower() not in known:
            raise ValueError(f"is none of {', '.join(meanings)}")
        return known[text.lower()]

    return read


def _first_line(text: str) -> str:
    """Return what FasterTransformer's strtol reads of a key that is given several times."""
    return text.partition("\n")[0]


COUNT, INDEX = whole(1), whole(0)
FLAG = one_of(dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False))
"""Kind: the words that FasterTransformer's INIReader::GetBoolean takes."""
