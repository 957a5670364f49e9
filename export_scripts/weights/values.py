"""Values out of a checkpoint's configuration: taken by key and type, and cut short where an error shows them."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any

from handover.errors import CheckpointError

_SHOWN = 200
_MOST_AXES = 16
_MOST = 1 << 48
"""Of any size or place: they can be multiplied and counted in."""
_REQUIRED: Any = object()


def positive(value: Any, where: str, hint: str = "") -> int:
    """Take a size.

    Args:
        value: that stands in a configuration.
        where: file and key.
        hint: what else may be wrong.

    Raises:
        CheckpointError: it is no positive number.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{where} is {quoted(value)}, not a positive number", hint)
    return value


def bounded(value: Any, where: str, most: int, hint: str = "") -> int:
    """Take a size of at most so much: what is listed or computed of it ends; CheckpointError: it is none."""
    result = positive(value, where, hint)
    if result > most:
        raise CheckpointError(f"{where} is {quoted(value)}, which no model has", f"the most is {most:,}")
    return result


def number(value: Any, where: str) -> float:
    """Take a finite number; CheckpointError: it is none."""
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        result = float("nan")
    if not isfinite(result):
        raise CheckpointError(f"{where} is {quoted(value)}, not a number")
    return result


def epsilon(value: Any, where: str) -> float:
    """Take what a norm adds to a variance; CheckpointError: it is none that a norm can have."""
    result = number(value, where)
    if not 0 < result < 1:
        raise CheckpointError(f"{where} is {quoted(value)}", "the epsilon of a norm is above 0 and below 1")
    return result


def whole(value: Any, where: str, least: int = 0) -> int:
    """Take a count, a place or an id; CheckpointError: it is no whole number that can be one."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MOST:
        raise CheckpointError(f"{where} is {quoted(value)}, not a whole number from {least} on")
    return value


def sizes(value: Any, where: str) -> tuple[int, ...]:
    """Take a shape or a place in one; CheckpointError: it is no list of a few whole numbers."""
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_AXES:
        raise CheckpointError(f"{where} is {quoted(value)}, not a list of sizes")
    return tuple(whole(each, where) for each in value)


def text(value: Any, where: str) -> str:
    """Take a text; CheckpointError: it is none."""
    if not isinstance(value, str):
        raise CheckpointError(f"{where} is {quoted(value)}, not a text")
    return value


def entries(value: Any, where: str) -> list[Any]:
    """Take a list; CheckpointError: it is none."""
    if not isinstance(value, (list, tuple)):
        raise CheckpointError(f"{where} is {quoted(value)}, not a list")
    return list(value)


class Fields(Mapping[str, Any]):
    """A mapping out of what describes a checkpoint: each value is taken by its key and the type that it must have.

    Args:
        content: that was read.
        where: its file, and its place there if it is not all of it.

    Raises:
        CheckpointError: naming file, key, what is found and what is wanted; of the content itself too.
    """

    def __init__(self, content: Any, where: str) -> None:
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{where} is {quoted(content)}, not a mapping", "copy the checkpoint again")
        self._content, self._where = content, where

    def __getitem__(self, key: str) -> Any:
        return self._content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def text(self, key: str, default: str = _REQUIRED) -> str:
        """Take a text."""
        return text(self._of(key, default), f"{self._where}: {key}")

    def whole(self, key: str, default: int = _REQUIRED) -> int:
        """Take a count, a place or an id."""
        return whole(self._of(key, default), f"{self._where}: {key}")

    def sizes(self, key: str) -> tuple[int, ...]:
        """Take a shape."""
        return sizes(self._of(key), f"{self._where}: {key}")

    def entries(self, key: str, default: Any = _REQUIRED) -> list[Any]:
        """Take a list; null is the default."""
        value = self._of(key, default)
        return entries(default if value is None and default is not _REQUIRED else value, f"{self._where}: {key}")

    def fields(self, key: str, default: Any = _REQUIRED) -> Fields:
        """Take a mapping within; null is the default."""
        value = self._of(key, default)
        return Fields(default if value is None and default is not _REQUIRED else value, f"{self._where}: {key}")

    def _of(self, key: str, default: Any = _REQUIRED) -> Any:
        if key in self._content:
            return self._content[key]
        if default is _REQUIRED:
            raise CheckpointError(f"{self._where} has no {key}", "copy the checkpoint again")
        return default


def wholes(content: Any, where: str) -> dict[str, int]:
    """Take ids by their names, of which there may be hundreds of thousands; CheckpointError: one of them is none."""
    found: dict[str, Any] = content if isinstance(content, dict) else dict(Fields(content, where))
    ids = found.values()
    if not (set(map(type, ids)) <= {int} and min(ids, default=0) >= 0 and max(ids, default=0) < _MOST):
        for name, number in found.items():
            whole(number, f"{where}: {shown(name)}")
    return found


def shown(value: Any) -> str:
    """Show a value without quotes."""
    return value[:_SHOWN] if isinstance(value, str) else reprlib.repr(value)


def quoted(value: Any) -> str:
    """Show a value as it would be written, a word in quotes."""
    return repr(value[:_SHOWN]) if isinstance(value, str) else reprlib.repr(value)
