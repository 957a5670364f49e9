"""Cells of the tables that the benchmarks write: what a missing value, a number and a truth look like in a CSV."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What a text begins with that a spreadsheet would compute."""
_QUOTE = "'"


def render(value: Any) -> Any:
    """Give a cell's content: six digits of a float, nothing for None, no formula, one kind of line end."""
    if value is None:
        return ""
    if isinstance(value, str):  # a lone carriage return would end the row: csv does not quote it
        value = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"{value:.6g}" if isinstance(value, float) else plain(value)


def plain(value: Any) -> Any:
    """Put a quote before a text that a spreadsheet would take for a formula; ``parse`` takes it away again.

    Samples and names are strangers' words: ``=HYPERLINK(...)`` in one shall not be run by who opens a table. A text
    that is a number stays as it is, and so does everything that is no text.
    """
    if not isinstance(value, str) or not value.lstrip(_QUOTE).startswith(_FORMULA):
        return value
    try:
        float(value)
    except ValueError:
        return _QUOTE + value
    return value


def unquoted(cell: str) -> str:
    """Inverse of ``plain``."""
    return cell[1:] if cell.startswith(_QUOTE) and cell.lstrip(_QUOTE).startswith(_FORMULA) else cell


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
        return unquoted(cell)
    if hint is bool:
        if cell not in ("True", "False"):
            raise ValueError(f"'{cell}' is neither True nor False")
        return cell == "True"
    kinds = typing.get_args(hint) or (hint,)
    if cell == "" and type(None) in kinds:
        return None
    return float(cell) if float in kinds else int(cell)
