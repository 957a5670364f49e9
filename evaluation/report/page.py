"""Parts of a self-contained HTML page in the report's look; every text is escaped."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

_TEMPLATE = Path(__file__).with_name("report_template.html")


def render_page(title: str, summary: str, sections: Iterable[str]) -> str:
    """Render a page from its sections, which are HTML."""
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), summary=escape(summary), sections="\n".join(sections)
    )


def section(heading: str, content: str) -> str:
    """Render a section; the content is HTML."""
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


def figure(svg: str, caption: str) -> str:
    """Render a plot with its caption."""
    return f'<figure class="plot">{svg}<figcaption>{escape(caption)}</figcaption></figure>'


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numeric: Container[str],
    caption: str = "",
    errors: Sequence[str] | None = None,
) -> str:
    """Render a table; a row with an error shows it in place of its figures."""

    def cell(column: str, text: str) -> str:
        return f'<td class="number">{escape(text)}</td>' if column in numeric else f"<td>{escape(text)}</td>"

    lines = []
    for number, row in enumerate(rows):
        error = errors[number] if errors else ""
        if error:
            failed = f'<td class="failed" colspan="{len(columns) - 1}"><span>failed: {escape(error)}</span></td>'
            lines.append(f"<tr>{cell(columns[0], row[0])}{failed}</tr>")
        else:
            lines.append(f"<tr>{''.join(cell(*pair) for pair in zip(columns, row, strict=True))}</tr>")
    return frame(columns, lines, numeric, caption)


def frame(columns: Sequence[str], rows: Sequence[str], numeric: Container[str], caption: str = "") -> str:
    """Render a table around rows that are HTML; columns in ``numeric`` align to the right."""
    heads = ""
    for column in columns:
        style = ' class="number"' if column in numeric else ""
        heads += f'<th scope="col"{style}>{_breakable(column)}</th>'
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    body = f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="wide"><table>{title}{body}</table></div>'


def _breakable(head: str) -> str:
    """Let a column's head break after an underscore, and in ``tokens/s``."""
    return re.sub(r"_|(?<=[a-z])/", r"\g<0><wbr>", escape(head))


def problems(remarks: Sequence[str], first: str = "") -> list[str]:
    """Render what must be known before the figures are read: HTML, then a list; nothing if there is none."""
    listed = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    if not listed and not first:
        return []
    listed = f"<ul>{listed}</ul>" if listed else ""
    return [f'<section class="problems"><h2>What to know first</h2>{first}{listed}</section>']


def style_of(verdict: str) -> str:
    """CSS class of a cell with a verdict of a comparison."""
    return {"better": "better", "worse": "worse"}.get(verdict, "")
