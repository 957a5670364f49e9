"""Parts of a self-contained HTML page in the report's look; every text is escaped unless it is ``Markup``."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: what it shows.
        note: smaller, below the text.
        style: CSS class of the note, or of the cell where there is no note.
    """

    text: str
    note: str = ""
    style: str = ""


def _breakable(head: str) -> Markup:
    """Let a column's head break after an underscore, and in ``tokens/s``."""
    return Markup(re.sub(r"_|(?<=[a-z])/", r"\g<0><wbr>", str(escape(head))))


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")), autoescape=True, undefined=StrictUndefined
)
_ENVIRONMENT.filters["breakable"] = _breakable


def render_page(title: str, summary: str, sections: Iterable[Markup]) -> str:
    """Render a page from its sections."""
    return _ENVIRONMENT.get_template("page.html").render(title=title, summary=summary, sections=list(sections))


def part(name: str, *contents: object) -> Markup:
    """Render a part of ``parts.html`` that needs no preparation."""
    return Markup(getattr(_ENVIRONMENT.get_template("parts.html").module, name)(*contents))


def section(heading: str, *contents: Markup) -> Markup:
    """Render a section of its parts."""
    return part("section", heading, Markup("").join(contents))


def figure(svg: str, caption: str) -> Markup:
    """Render a plot, which is HTML, with its caption."""
    return part("figure", Markup(svg), caption)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Cell]],
    numeric: Container[str],
    caption: str = "",
    errors: Sequence[str] | None = None,
) -> Markup:
    """Render a table; columns in ``numeric`` align to the right.

    A row with an error shows the error in place of its figures.
    """
    heads = [(column, column in numeric) for column in columns]
    cells = [[text if isinstance(text, Cell) else Cell(text) for text in row] for row in rows]
    return part("table", heads, list(zip(cells, errors or [""] * len(cells), strict=True)), caption)


def problems(remarks: Sequence[str], first: Markup | None = None) -> list[Markup]:
    """Render what must be known before the figures are read: HTML, then a list; nothing if there is none."""
    return [part("problems", first or "", list(remarks))] if remarks or first else []


def style_of(verdict: str) -> str:
    """CSS class of a cell with a verdict of a comparison."""
    return {"better": "better", "worse": "worse"}.get(verdict, "")
