"""Cells of the tables that the benchmarks write: what a missing value, a number and a truth look like in a CSV."""

from __future__ import annotations

import typing
from typing import Any


def render(value: Any) -> Any:
    """Give a cell's content: six digits of a float, nothing for None."""
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


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
