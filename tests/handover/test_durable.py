"""What is being written has a name of ours until it is whole; what a killed writer left goes with the next write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from handover import durable
from handover.durable import is_temporary, remove_temporaries, temporary_beside, write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_next_writer_of_a_file_removes_what_killed_ones_left_and_nothing_else(tmp_path: Path) -> None:
    of_another = temporary_beside(tmp_path / "plan.json")
    like_ours = [".stages.json.4711", "stages.json.0a1b2c3d.slipway-tmp", ".stages.json.0a1b2c3.slipway-tmp"]
    for name in (of_another.name, *like_ours, temporary_beside(tmp_path / "stages.json").name):
        (tmp_path / name).write_text("half")
    write_atomically(tmp_path / "stages.json", "new")
    assert names(tmp_path) == sorted([of_another.name, *like_ours, "stages.json"])
    assert (tmp_path / "stages.json").read_text() == "new"


def test_a_writer_whose_temporary_is_taken_for_a_killed_ones_writes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, times = os.replace, iter(range(9))

    def replace_late(source: Path, target: Path) -> None:
        if next(times) < 3:
            remove_temporaries(tmp_path, of="stages.json")  # another run starts just now
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_late)
    write_atomically(tmp_path / "stages.json", "new")
    assert names(tmp_path) == ["stages.json"] and next(times) == 4


def test_a_directory_that_was_being_removed_is_a_temporary_too(tmp_path: Path) -> None:
    begun = temporary_beside(tmp_path / "1-gpu.partial")
    (begun / "deep").mkdir(parents=True)
    remove_temporaries(tmp_path, of="1-gpu")
    assert begun.exists() and is_temporary(begun.name)
    remove_temporaries(tmp_path, of="1-gpu.partial")
    assert names(tmp_path) == []


def test_a_file_gets_its_name_only_when_its_content_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(durable, "sync", lambda path: done.append(f"sync {path.suffix}"))
    monkeypatch.setattr(os, "replace", lambda source, target: done.append("rename"))
    write_atomically(tmp_path / "stages.json", "new")
    assert done == ["sync .slipway-tmp", "rename", "sync "]
