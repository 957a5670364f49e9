"""Arguments that are written as literals of a language: Python's, or Gemma's own, whose texts stand between marks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?=[^-+.0-9eE])")
"""With what follows it, or it might go on."""
_TEXT = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


@dataclass(frozen=True)
class Literals:
    """How values are written; what is not said here is as in JSON.

    Attributes:
        assign: between an argument's key and its value.
        comma: between two of anything.
        colon: behind a key within a value.
        mark: around a text, which has no escapes then; empty: a text is one of JSON.
        true, false, null: these three.
        is_sorted: whether keys come in the order of the alphabet, as the template writes them, or else in the schema's.
    """

    assign: str
    comma: str
    colon: str
    mark: str = ""
    true: str = "true"
    false: str = "false"
    null: str = "null"
    is_sorted: bool = False

    @property
    def words(self) -> dict[str, str]:
        """The three words, and what each is in JSON."""
        return {self.true: "true", self.false: "false", self.null: "null"}

    def write(self, value: Any) -> str:
        """Write a value."""
        if isinstance(value, str):
            return f"{self.mark}{value}{self.mark}" if self.mark else json.dumps(value, ensure_ascii=False)
        if isinstance(value, dict):
            pairs = [f"{self.write_key(key)}{self.colon}{self.write(each)}" for key, each in value.items()]
            return f"{{{self.comma.join(pairs)}}}"
        if isinstance(value, list | tuple):
            return f"[{self.comma.join(map(self.write, value))}]"
        by_json = {json_word: word for word, json_word in self.words.items()}
        written = json.dumps(value)
        return by_json.get(written, written)

    def write_key(self, key: str) -> str:
        """Write a key within a value: between marks only where it could not be told from what follows."""
        return key if self.mark and is_bare(key) else self.write(key)


def is_bare(key: str) -> bool:
    """Whether a key can be told from what follows it."""
    return bool(key) and not re.search(r"[\s=:,(){}\[\]\"'<>|]", key)


def read_argument(literals: Literals, text: str) -> tuple[str, str, str] | None:
    """Read a key and its value at the beginning of a text; returns both, the value as JSON, and the rest.

    None: the text ends within them.
    """
    key, found, _ = text.partition(literals.assign)
    scan = _Scan(literals, text, len(key) + len(found))
    try:
        value = scan.value()
    except _EndError:
        return None
    return key, value, text[scan.place :]


class _EndError(Exception):
    """The text ends within a value, or has none."""


class _Scan:
    """Reads values.

    Args:
        literals: in which they are written.
        text: that has them.
        place: in it, where the next one begins.
    """

    def __init__(self, literals: Literals, text: str, place: int) -> None:
        self._literals, self._text, self.place = literals, text, place

    def value(self) -> str:
        """Read a value; returns it as JSON."""
        literals = self._literals
        if self._take("["):
            return f"[{', '.join(self._listed(']', self.value))}]"
        if self._take("{"):
            return f"{{{', '.join(self._listed('}', self._pair))}}}"
        if literals.mark and self._take(literals.mark):
            return json.dumps(self._until(literals.mark), ensure_ascii=False)
        for word, written in literals.words.items():
            if self._take(word):
                return written
        found = _NUMBER.match(self._text, self.place) or (not literals.mark and _TEXT.match(self._text, self.place))
        if not found:
            raise _EndError
        self.place = found.end()
        return found[0]

    def _listed(self, end: str, read: Any) -> list[str]:
        read_so_far = list[str]()
        while not self._take(end):
            if read_so_far and not self._take(self._literals.comma):
                raise _EndError
            read_so_far.append(read())
        return read_so_far

    def _pair(self) -> str:
        literals = self._literals
        if self._text.startswith(literals.mark or '"', self.place):
            key = self.value()
            if not self._take(literals.colon):
                raise _EndError
        else:
            key = json.dumps(self._until(literals.colon), ensure_ascii=False)
        return f"{key}: {self.value()}"

    def _take(self, expected: str) -> bool:
        is_there = self._text.startswith(expected, self.place)
        self.place += len(expected) * is_there
        return is_there

    def _until(self, mark: str) -> str:
        start, end = self.place, self._text.find(mark, self.place)
        if end < 0:
            raise _EndError
        self.place = end + len(mark)
        return self._text[start:end]
