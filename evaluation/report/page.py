"""Documents from the templates beside this module: self-contained HTML pages, and Markdown.

Every text is escaped: in HTML by the environment, in Markdown by the filters ``plain``, ``bullets`` and ``table``.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
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
    """Let a column's head, which is escaped, break after an underscore, and in ``tokens/s``."""
    return re.sub(r"_|(?<=[a-z])/", r"\g<0><wbr>", str(head))


def _style_of(verdict: str) -> str:
    """CSS class of a cell with a verdict of a comparison."""
    return {"better": "better", "worse": "worse"}.get(verdict, "")


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"breakable": _breakable, "style_of": _style_of}
_ENVIRONMENT.filters |= {"plain": escape_markdown, "bullets": markdown_list, "table": _table}
