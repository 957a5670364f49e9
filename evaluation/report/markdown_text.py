"""Markdown that shows a text as it is."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence


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
