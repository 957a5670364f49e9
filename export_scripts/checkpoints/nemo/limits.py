"""What FasterTransformer has no counterpart for: a key, the values that are fine, and what there is instead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from models.checks import shown

_SHOWN = 12


@dataclass(frozen=True)
class Limit:
    """A key whose value FasterTransformer's model cannot follow.

    Attributes:
        is_fine: of the key's value; a missing key is always fine.
        reason: what FasterTransformer has instead.
    """

    is_fine: Callable[[Any], bool]
    reason: str


def is_off(value: Any) -> bool:
    """Whether a key is null, false, zero or empty."""
    return not value


def is_on(value: Any) -> bool:
    """Whether a key is true, or left to its default."""
    return value is None or bool(value)


def is_one_of(*legal: Any) -> Callable[[Any], bool]:
    """Make the test for one of some values."""
    return lambda value: value in legal


def problems(config: Mapping[str, Any], limits: Mapping[str, Limit], where: str = "") -> list[str]:
    """List the keys in the way, one line each."""
    return [
        f"{where}{key}: {shown(config[key])}  ({limit.reason})"
        for key, limit in limits.items()
        if key in config and not limit.is_fine(config[key])
    ]


def unknown_keys(config: Mapping[str, Any], known: Collection[str], where: str = "") -> list[str]:
    """List the keys that no list has and that are set, so that they may change what is computed."""
    return [f"{where}{key}: {shown(value)}" for key, value in config.items() if value and key not in known]


def remark_on(unknown: list[str], file: str) -> tuple[str, ...]:
    """List the keys that are not known, in one line; nothing where all are."""
    if not unknown:
        return ()
    more = f", and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
    return (
        f"{file} sets keys that are not known here, and they are left out: {', '.join(unknown[:_SHOWN])}{more}; "
        "evaluation=parity compares the served model with the checkpoint where it can",
    )
