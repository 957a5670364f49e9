"""Values out of a checkpoint's configuration: checked, and cut short where an error shows them."""

from __future__ import annotations

import reprlib
from math import isfinite
from typing import Any

from handover.errors import CheckpointError

_SHOWN = 200


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


def number(value: Any, where: str) -> float:
    """Take a finite number; CheckpointError: it is none."""
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        result = float("nan")
    if not isfinite(result):
        raise CheckpointError(f"{where} is {quoted(value)}, not a number")
    return result


def shown(value: Any) -> str:
    """Show a value without quotes."""
    return value[:_SHOWN] if isinstance(value, str) else reprlib.repr(value)


def quoted(value: Any) -> str:
    """Show a value as it would be written, a word in quotes."""
    return repr(value[:_SHOWN]) if isinstance(value, str) else reprlib.repr(value)
