"""Values out of a checkpoint's configuration: taken by key and type, and cut short where an error shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from handover.errors import CheckpointError
from models.checks import MOST, Checks, quoted, shown
from models.errors import ModelError

_REQUIRED: Any = object()
_CHECKS = Checks(CheckpointError)
positive, bounded, number, epsilon = _CHECKS.positive, _CHECKS.bounded, _CHECKS.number, _CHECKS.epsilon
above_zero = _CHECKS.above_zero
whole, sizes, text, entries = _CHECKS.whole, _CHECKS.sizes, _CHECKS.text, _CHECKS.entries


@contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Raise what is wrong with a description of models/ as an error of the checkpoint."""
    try:
        yield
    except ModelError as error:
        raise CheckpointError(error.problem, error.hint) from error


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
    if not (set(map(type, ids)) <= {int} and min(ids, default=0) >= 0 and max(ids, default=0) < MOST):
        for name, number in found.items():
            whole(number, f"{where}: {shown(name)}")
    return found
