"""What a setting names as a file is read only if it is one: never a device, a pipe, or a file without end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from evaluation.parity.arguments import ParityArguments
from evaluation.parity.prompts import read_prompts
from evaluation.recommend import read_budget
from evaluation.report.thresholds import read_thresholds
from evaluation.request import read_request
from evaluation.speed.prompts.prompt_file import read_prompt_file
from evaluation.tasks.lambada.data import check_data, read_texts
from evaluation.tasks.prompt_template import read_template
from evaluation.tasks.squad.data import read_dataset
from evaluation.tasks.texts.pairs import read_pairs
from handover.errors import SlipwayError
from handover.regular_file import read_bytes, read_text

READERS: dict[str, Callable[[Path], Any]] = {
    "bytes": read_bytes,
    "lambada's digest": lambda path: check_data(path, None),
    "lambada": lambda path: read_texts(path, None),
    "squad": lambda path: read_dataset(path, None),
    "sources": lambda path: read_pairs(path, path, None),
    "load": lambda path: read_prompt_file(path, None, None),
    "prompt": lambda path: read_template(path, ["question"]),
    "thresholds": read_thresholds,
    "budget": read_budget,
    "request": lambda path: read_request(path, {}),
    "parity": lambda path: read_prompts(ParityArguments("localhost:1", path, path, data_path=path)),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["device", "pipe", "directory", "without end"])
def test_what_is_no_regular_file_is_refused_at_once(reader: str, kind: str, tmp_path: Path) -> None:
    path = Path("/dev/zero") if kind == "device" else tmp_path / "named"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "without end":
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises((SlipwayError, OSError)) as refused:
        READERS[reader](path)
    assert any(word in str(refused.value) for word in ("regular file", "more than", "directory"))


def test_regular_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("é\r\nline\n".encode())
    assert read_bytes(path) == "é\r\nline\n".encode()
    assert read_text(path) == path.read_text(encoding="utf-8"), "with the same line ends as Python's own"
    (tmp_path / "link").symlink_to(path)
    assert read_text(tmp_path / "link") == "é\nline\n"
    with pytest.raises(OSError, match="more than 0 MiB"):
        read_bytes(path, 3)
