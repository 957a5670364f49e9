"""A reader that leaves early, as ``| head`` does, ends a program quietly, with the status of SIGPIPE."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
NEMO = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"


def run_without_reader(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose output is no longer read, from its first byte on."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        return subprocess.run(
            [sys.executable, *words], cwd=PROJECT, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=120
        )
    finally:
        os.close(write_end)


@pytest.mark.parametrize("words", [["--cfg", "job"], ["--help"], ["dry_run=true", "cluster_type=interactive"]])
def test_main_ends_quietly(words: list[str], tmp_path: Path) -> None:
    place = () if words[0].startswith("-") else (f"base_results_dir={tmp_path}", f"export.model.checkpoint_path={NEMO}")
    ended = run_without_reader("main.py", *words, *place)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_the_other_programs_end_quietly(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "convert.log").write_text("a line\n" * 30)
    entry = {"stage": "convert", "name": "c", "state": "done", "elapsed_s": 1, "log": str(logs / "convert.log")}
    (logs / "stages.json").write_text(json.dumps([{**entry, "error": "", "exit_status": 0, "output": ""}]))
    for words in (["launcher", "logs"], ["launcher", "status"], ["export_scripts.inspect"]):
        what = NEMO if words[0] == "export_scripts.inspect" else tmp_path
        ended = run_without_reader("-m", *words, str(what))
        assert (ended.returncode, ended.stderr) == (141, ""), words
    assert run_without_reader("-m", "evaluation.gate", "--help").stderr == ""


def test_a_pipe_of_another_kind_is_no_reader_that_left() -> None:
    code = "from handover.output import reader_may_leave\nwith reader_may_leave():\n raise BrokenPipeError('a socket')"
    ended = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert ended.returncode == 1 and "a socket" in ended.stderr
