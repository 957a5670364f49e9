"""Self-contained HTML pages in the report's look, from the templates beside this module; every text is escaped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


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
        template: name of its file.
        values: by the names that it uses.
    """
    return _ENVIRONMENT.get_template(template).render(**values)


def _breakable(head: str) -> str:
    """Let a column's head, which is escaped, break after an underscore, and in ``tokens/s``."""
    return re.sub(r"_|(?<=[a-z])/", r"\g<0><wbr>", str(head))


def _style_of(verdict: str) -> str:
    """CSS class of a cell with a verdict of a comparison."""
    return {"better": "better", "worse": "worse"}.get(verdict, "")


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"breakable": _breakable, "style_of": _style_of}
