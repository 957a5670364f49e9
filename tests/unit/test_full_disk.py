"""A full disk is the user's to mend: one message, and nothing half-written stays."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from handover.durable import write_atomically
from handover.errors import exit_status
from launcher import console


def full(arguments: Sequence[str]) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/results/x.csv")


def test_a_script_and_the_launcher_say_it_in_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x"])
    assert exit_status(full, "evaluate") == 1
    with pytest.raises(SystemExit) as ended, console.worded_errors():
        full([])
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert said.count("cannot write (/results/x.csv): No space left on device") == 2 and "Traceback" not in said


def test_another_error_of_the_system_keeps_its_traceback() -> None:
    def lost(arguments: Sequence[str]) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file")

    with pytest.raises(FileNotFoundError):
        exit_status(lost, "evaluate")


def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stages.json").write_text("old")

    def write_half(path: Path, content: str) -> None:
        with path.open("w") as stream:
            stream.write(content[:2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "stages.json", "new content")
    assert [path.name for path in tmp_path.iterdir()] == ["stages.json"]
    assert (tmp_path / "stages.json").read_text() == "old"
