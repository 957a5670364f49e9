"""Words that this project does not use, with what is said in their place: a glossary is in CONTRIBUTING.md.

To keep another word out, add a line to ``WORDS``.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
WORDS = {
    r"likeliest": "argmax, or the most probable token: the field's term can be searched for",
    r"nobody": "say which process, client or test does not: 'no client', 'no rank', 'unowned'",
    r"\banew\b": "again; a process restarts",
    r"\bin vain\b": "say what failed: 'after 3 failed attempts', 'timed out'",
    r"\bfarewell": "the shutdown message",
    r"\bso many\b": "'that many', or the name of the count",
    r"(?-i:\bLikewise\b)": "write the sentence out: a docstring stands by itself",
    r"\bSee there\b": "name the place",
    r"\bcrew\b": "worker processes",
    r"(?-i:\"\"\"Of (?:a|an|the|one|some|this)\b)": "a docstring is a sentence: 'Control connections of one rank.'",
    r"\bNorming\b": "Norm",
    r"\bfan_out\b": "column_parallel",
    r"\bfew_rows\b|\bone_row(?:_int8)?\b": "small_m_gemm, gemv",
    r"(?-i:\bManner\b)": "AttentionSpec",
    r"(?-i:\bFlight\b)|\b_?flights\b": "pending tokens",
    r"\blife signs?\b": "heartbeat",
    r"\bblock[ _]tables?\b": "page table",
    r"\bsend\w* (?:us|them|the \w+(?: \w+)?) home\b": "tell the workers to exit",
}
"""Pattern of a word (in any case, unless it says otherwise) and what is said in its place."""

DOCSTRING = re.compile(r'"""(?:Give|Say|Let) ')
DOCSTRINGS_OF = ("deployment/", "evaluation/", "export_scripts/", "ft_format/", "handover/", "launcher/", "models/")

PENDING: tuple[str, ...] = ()
"""Files or folders that still have some of them. Clean one and take it off."""

READ = ("*.py", "*.md", "*.yaml", "*.yml", "*.toml", "*.html", "Makefile", ".ci/*", "docker/*")
LEFT_OUT = (
    *("tests/project/test_words.py", "CONTRIBUTING.md", "CHANGELOG.md", "results", "tests/data", "examples/data"),
    "tests/support/measurements/nemo_tokenizer_cases.py",  # sentences whose recorded token ids are NeMo's
)


def project_files() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *READ]
    listed = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if not name.startswith(LEFT_OUT) and (PROJECT / name).is_file()]


@pytest.fixture(scope="module")
def lines() -> list[tuple[str, int, str]]:
    """File, line number and text of everything that is written here."""
    return [
        (name, number, line)
        for name in project_files()
        for number, line in enumerate((PROJECT / name).read_text(errors="replace").splitlines(), 1)
    ]


@pytest.mark.parametrize("word", WORDS)
def test_the_word_is_not_used(word: str, lines: list[tuple[str, int, str]]) -> None:
    pattern = re.compile(word, re.IGNORECASE)
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, number, line in lines
        if pattern.search(line) and not name.startswith(PENDING)
    ]
    assert not found, "\n".join([f"write instead: {WORDS[word]}", *found])


def test_a_docstring_says_return_print_or_what_else_is_done(lines: list[tuple[str, int, str]]) -> None:
    found = [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, number, line in lines
        if name.startswith(DOCSTRINGS_OF) and DOCSTRING.search(line)
    ]
    assert not found, "\n".join(["begin with the verb of what is done: Return, Yield, Print, Release", *found])


def test_a_word_is_found_where_it_stands() -> None:
    """The patterns find what they are meant for, and leave ordinary English alone."""
    caught = [
        "The likeliest token",
        "nobody has it",
        "started anew",
        "Likewise.",
        '"""Of one process."""',
        "sends us home",
    ]
    spared = ["in-flight batching", "a manner of speaking", "renewed", "she sends messages", '"""Offsets of rows."""']
    patterns = [re.compile(word, re.IGNORECASE) for word in WORDS]
    assert all(any(pattern.search(text) for pattern in patterns) for text in caught)
    assert DOCSTRING.search('    """Give the size."""') and not DOCSTRING.search('"""Given sizes."""')
    assert not [text for text in spared if any(pattern.search(text) for pattern in patterns)]
