"""docs/openai.md lists the fields that the code takes and refuses, and no others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from deployment.openai.bodies.fields import CHAT, COMPLETIONS, REFUSED, Field

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "openai.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize(("where", "table"), [("completions", COMPLETIONS), ("chat", CHAT)])
def test_every_field_has_a_row(where: str, table: Mapping[str, Field]) -> None:
    rows = {row[0].strip("`"): row[2:] for row in ROWS if row[1] in ("both", where)}
    assert rows.keys() == table.keys()
    for name, field in table.items():
        kind, default, goes_to = rows[name]
        assert kind == field.kind
        assert goes_to == field.goes_to + (", if the model has it" if field.is_optional else "")
        assert default == ("" if field.default in (None, (), "") else str(field.default).lower().removesuffix(".0"))


def test_every_refused_field_is_named_with_what_to_do() -> None:
    rows = {name: row[1] for row in ROWS for name in re.findall("`([a-z_]+)`", row[0]) if row[1] in REFUSED.values()}
    assert rows == REFUSED
