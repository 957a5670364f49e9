"""Cells of the tables that the benchmarks write: what a missing value, a number and a truth look like in a CSV."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any


def render(value: Any) -> Any:
    """Give a cell's content: six digits of a float, nothing for None."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


NEWER_COLUMNS = ("int8_mode", "versions")
"""Columns that tables of Slipway 0.1 do not have; such tables are still read, as an earlier run's baseline for one."""


def has_columns(found: Sequence[str] | None, expected: Sequence[str]) -> bool:
    """Whether a table has the columns that it should have, or had them before NEWER_COLUMNS came."""
    older = [name for name in expected if name not in NEWER_COLUMNS]
    return found is not None and list(found) in (list(expected), older)


def parse(cell: str, hint: Any) -> Any:
    """Read a cell as the type of its column.

    Raises:
        ValueError: it is none of that type.
    """
    if hint is str:
        return cell
    if hint is bool:
        if cell not in ("True", "False"):
            raise ValueError(f"'{cell}' is neither True nor False")
        return cell == "True"
    kinds = typing.get_args(hint) or (hint,)
    if cell == "" and type(None) in kinds:
        return None
    return float(cell) if float in kinds else int(cell)
