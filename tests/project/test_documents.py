"""The documents that a newcomer meets are short and linked. ``make docs`` checks the links between pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from handover.provenance import VERSION

PROJECT = Path(__file__).resolve().parents[2]
DOCS = PROJECT / "docs"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def test_the_readme_is_short() -> None:
    assert len((PROJECT / "README.md").read_text().splitlines()) <= 130


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_what_a_document_links_to_exists(name: str) -> None:
    targets = [target for target in LINK.findall((PROJECT / name).read_text()) if "://" not in target]
    assert [target for target in targets if not (PROJECT / target).exists()] == []


def test_a_path_that_a_document_names_exists() -> None:
    """Paths of this project in backticks, ``engine/`` meaning the drop-in engine's."""
    roots = [PROJECT, PROJECT / "backends" / "fastertransformer"]
    ours = {entry.name for root in roots for entry in root.iterdir() if entry.is_dir()} - {"results", "site"}
    named = re.compile(r"`((?:[A-Za-z_0-9]+/)+(?:[A-Za-z_0-9]+\.(?:py|yaml|md))?)(?:::\w+)?`")
    gone = {
        f"{page.name}: {path}"
        for page in (PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", PROJECT / "SECURITY.md", *DOCS.rglob("*.md"))
        for path in named.findall(page.read_text())
        if path.split("/")[0] in ours and not any((root / path).exists() for root in roots)
    }
    assert gone == set()


def test_every_page_is_in_the_sites_navigation() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        inner = entry.values() if isinstance(entry, dict) else entry
        assert not isinstance(inner, int)
        return [page for each in inner for page in pages(each)]  # type: ignore[attr-defined]

    listed = pages(yaml.safe_load((PROJECT / "mkdocs.yml").read_text())["nav"])
    assert sorted(listed) == sorted(str(file.relative_to(DOCS)) for file in DOCS.rglob("*.md"))


def test_pages_are_at_most_120_columns_wide() -> None:
    """But for what Markdown cannot break: a row of a table, and a word that is longer by itself, as an address is."""
    roots = ("*.md", "docs/**/*.md", "examples/*/*.md", "results/notebook/*.md", "results/reference/**/README.md")
    pages = [page for name in (*roots, "tests/data/*/*.md") for page in PROJECT.glob(name)]
    assert [
        f"{page.relative_to(PROJECT)}:{number}"
        for page in pages
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if len(line) > 120 and not line.lstrip().startswith("|") and len(max(line.split(), key=len)) <= 110
    ] == []


def test_every_table_that_was_measured_has_a_line() -> None:
    tables = PROJECT / "results" / "reference" / "h200"
    listed = re.findall(r"^\| `(.+\.csv)` \|", (tables / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(file.name for file in tables.glob("*.csv"))


def test_the_changelog_has_a_section_for_this_version() -> None:
    lines = (PROJECT / "CHANGELOG.md").read_text().splitlines()
    releases = [line.split()[1] for line in lines if line.startswith("## ") and line != "## Unreleased"]
    assert releases[0] == VERSION
