"""Numbers as people read them, and Markdown that shows a text as it is."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence


def show_figure(value: float | None) -> str:
    """Show three or more digits; very large figures (an untrained model's perplexity) and tiny ones by magnitude."""
    if value is None:
        return ""
    if value >= 1e7 or 0 < value < 0.01:
        return f"{value:.2e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def show_with_noise(value: float | None, noise: float | None) -> str:
    """Show a figure with half of its 95% interval; one that exceeds the figure itself is only called that."""
    if value is None or noise is None:
        return show_figure(value)
    return f"{show_figure(value)} ±{show_figure(noise) if noise <= value else '>100%'}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], numeric: Container[str] = ()) -> str:
    """Render a table; columns in ``numeric`` align to the right."""
    rule = ["---:" if column in numeric else "---" for column in columns]
    lines = [columns, rule, *([escape_markdown(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escape_markdown(text: str) -> str:
    """Keep text from being read as Markdown or HTML."""
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"([\\`*\[\]|#])", r"\\\1", text)
    # An underscore inside a word starts no emphasis; escaping it would only make names unreadable.
    text = re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)
    return re.sub(r"\s*\n\s*", "<br>", text)
