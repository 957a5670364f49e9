"""Cells of CSV tables: how missing values, numbers, truth values and texts are written and read."""

from __future__ import annotations

import csv
import io
import typing
from collections.abc import Iterable, Sequence
from typing import Any

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters of a text that a spreadsheet evaluates as a formula."""
_QUOTE = "'"


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return a CSV table, whose cells are rendered by ``render``."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(map(render, row) for row in rows)
    return buffer.getvalue()


def render(value: Any) -> Any:
    """Return a cell's content: a float with six digits, None as empty, no formula, and line feeds only."""
    if value is None:
        return ""
    if isinstance(value, str):  # a lone carriage return would end the row: csv does not quote it
        value = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"{value:.6g}" if isinstance(value, float) else plain(value)


def plain(value: Any) -> Any:
    """Put a quote before a text that a spreadsheet would evaluate as a formula; ``parse`` removes it again.

    Samples and names are untrusted: a spreadsheet that opens the table must not run ``=HYPERLINK(...)``. Texts that are
    numbers, and values that are no texts, stay unchanged.
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


def name_of_file(text: str) -> str:
    """Return a text as a part of a file's name: letters, digits, dots and dashes."""
    return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in text)


def parse(cell: str, hint: Any) -> Any:
    """Read a cell as the type of its column.

    Raises:
        ValueError: the cell is not of that type.
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
