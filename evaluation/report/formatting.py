"""Figures as text, tables of texts, and Markdown that shows a text as it is."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextTable:
    """A table for people.

    Attributes:
        caption: above it.
        columns: the first names the rows, the others hold numbers.
        rows: cells as text; what is missing is empty.
        errors: one a row, not empty where the row has no figures; empty where every row has them.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    errors: tuple[str, ...] = ()

    @property
    def measured(self) -> TextTable:
        """The table without the rows that have no figures."""
        errors = self.errors or ("",) * len(self.rows)
        rows = tuple(row for row, error in zip(self.rows, errors, strict=True) if not error)
        return TextTable(self.caption, self.columns, rows)


def show_figure(value: float | None) -> str:
    """Show three or more digits; very large figures (an untrained model's perplexity) and tiny ones by magnitude."""
    if value is None:
        return ""
    if value >= 1e7 or 0 < value < 0.01:
        return f"{value:.2e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def show_percent(value: float | None) -> str:
    """Show a fraction in percent, with two digits after the point; tiny ones with two digits that are not 0."""
    if value is None:
        return ""
    return f"{100 * value:.2g}%" if 0 < abs(value) < 0.001 else f"{100 * value:.2f}%"


def show_with_noise(value: float | None, noise: float | None) -> str:
    """Show a figure with half of its 95% interval; one that exceeds the figure itself is only called that."""
    if value is None or noise is None:
        return show_figure(value)
    return f"{show_figure(value)} ±{show_figure(noise) if noise <= value else 'over 100%'}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Container[str] = ()) -> str:
    """Render a table; columns in ``numeric`` align to the right."""
    rule = ["---:" if column in numeric else "---" for column in columns]
    heads, *cells = ([escape_markdown(cell) for cell in row] for row in (columns, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rule, *cells))


def markdown_list(texts: Iterable[str]) -> str:
    """Render a list, one item for each text."""
    return "\n".join(f"- {escape_markdown(text)}" for text in texts)


def escape_markdown(text: str) -> str:
    """Keep text from being read as Markdown or HTML."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|#])", r"\\\1", text)
    # An underscore inside a word starts no emphasis; escaping it would only make names unreadable.
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
    return re.sub(r"\s*\n\s*", "<br>", text)
