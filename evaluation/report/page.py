"""Documents from the templates beside this module: self-contained HTML pages, and Markdown.

Every text is escaped: in HTML by the environment, in Markdown by the filters ``plain``, ``bullets`` and ``table``.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape

from evaluation.report.formatting import TextTable, escape_markdown, markdown_list, markdown_table


@dataclass(frozen=True)
class Plot:
    """A plot of a page.

    Attributes:
        svg: as ``plot_style.draw_svg`` made it; it is not escaped.
        caption: below it.
    """

    svg: str
    caption: str

    @property
    def image(self) -> str:
        """The SVG as one image with alternative text: its caption, and where its numbers are."""
        title, _, further = escape(self.caption).partition(". ")
        desc = f"{further} The numbers are in the tables of this section.".strip()
        named = f'<svg role="img" aria-label="{escape(self.caption)}" '
        svg = self.svg.replace("<svg ", named, 1)
        end = svg.index(">") + 1
        return f"{svg[:end]}<title>{title.rstrip('.')}</title><desc>{desc}</desc>{svg[end:]}"


def render_page(template: str, **values: Any) -> str:
    """Fill a template.

    Args:
        template: name of its file, which ends with ``.html`` or ``.md``.
        values: by the names that it uses.
    """
    text = _ENVIRONMENT.get_template(template).render(**values)
    # A part of a Markdown document that is empty leaves blank lines behind.
    return text if template.endswith(".html") else re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _table(content: TextTable, numeric: Container[str] = ()) -> str:
    """Render a table in Markdown; columns in ``numeric`` align to the right."""
    return markdown_table(content.columns, content.rows, numeric)


def _breakable(head: str) -> str:
    """Return a name, which is escaped, that may break after an underscore or a point, and in ``tokens/s``."""
    return re.sub(r"[_.]|(?<=[a-z])/", r"\g<0><wbr>", str(head))


def _style_of(verdict: str) -> str:
    """CSS class of a cell with a verdict of a comparison, of the gate or of an evaluation."""
    good, bad = ("better", "GO", "HOLDS"), ("worse", "NO-GO", "FAILS")
    return "better" if verdict in good else "worse" if verdict in bad else "unsure" if verdict.isupper() else ""


_SIGNS = {"better": "✓", "worse": "✗", "unsure": "?"}


def _signed(verdict: str) -> str:
    """Put a sign before a verdict of the gate or of an evaluation, so that colour alone says nothing."""
    return f"{_SIGNS[_style_of(verdict)]} {verdict}"


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"breakable": _breakable, "style_of": _style_of, "signed": _signed}
_ENVIRONMENT.filters |= {"plain": escape_markdown, "bullets": markdown_list, "table": _table}
