"""What the operating system refuses is the user's to mend: one message, nothing half-written, nothing that hangs."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.checkpoints.nemo_archive import NEMO

from handover.durable import write_atomically
from handover.errors import exit_status
from launcher.plan.plan import Command, Resources, StagePlan, partial
from launcher.run import console
from launcher.run.place import Place
from launcher.run.process import Child
from launcher.runner import run_job

PROJECT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.EIO, "mounted"),
        (errno.ESTALE, "mounted"),
        (errno.ENOTCONN, "mounted"),
        (errno.ENOENT, "unmounted"),
        (errno.EACCES, "right"),
        (errno.ENOTDIR, "in the way"),
        (errno.EXDEV, ""),
    ],
)
def test_every_refusal_names_its_path_and_reason(
    number: int, advice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(arguments: Sequence[str]) -> None:
        raise OSError(number, os.strerror(number), "/results/a", None, "/results/b")

    monkeypatch.setattr(sys, "argv", ["x"])
    assert exit_status(refused, "export") == 1
    said = capsys.readouterr().err
    assert "/results/a -> /results/b" in said and os.strerror(number) in said and "Traceback" not in said
    assert advice in said.partition("hint:")[2] and bool(advice) == ("hint:" in said)


def test_a_defect_of_ours_keeps_its_traceback() -> None:
    def defect(arguments: Sequence[str]) -> None:
        raise AttributeError("x")

    with pytest.raises(AttributeError):
        exit_status(defect, "evaluate")


@pytest.mark.parametrize("root", ["/proc/x/y", "/dev/null/y", "/etc/passwd"])
def test_a_results_directory_that_cannot_be_is_said_before_anything_runs(root: str, tmp_path: Path) -> None:
    argv = [sys.executable, str(PROJECT / "main.py"), "cluster_type=interactive", "stages=[convert]"]
    argv += [f"base_results_dir={root}", f"export.model.checkpoint_path={NEMO / 'gpt122_tp1_pp1.nemo'}"]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=180)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert root.rpartition("/")[0] in ended.stderr.splitlines()[0]


PRINTS = "import sys; print('x\\n' * 200_000, flush=True); print('the reason', file=sys.stderr); sys.exit(3)"


def test_a_log_that_cannot_be_written_never_stops_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    child = Child([sys.executable, "-c", PRINTS], {}, Path("/dev/full"))
    assert child.wait(240) == 3, "it waits for somebody to read what it prints"
    shown, said = capsys.readouterr()
    assert len(shown) > 400_000 and "the reason" in said and child.last_lines
    assert said.count("cannot write to /dev/full: [Errno 28] No space left on device") == 1 and "Traceback" not in said


def test_a_terminal_that_cannot_be_written_never_stops_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w") as full_terminal:  # it may hold some until it is closed
        monkeypatch.setattr(sys, "stdout", full_terminal)
        child = Child([sys.executable, "-c", PRINTS], {}, tmp_path / "logs" / "x.log")
        assert child.wait(240) == 3
        monkeypatch.undo()
    assert (tmp_path / "logs" / "x.log").read_text().count("x\n") == 200_000


def test_a_log_that_cannot_be_opened_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.log").mkdir()
    with pytest.raises(IsADirectoryError):
        Child(["touch", str(tmp_path / "started")], {}, tmp_path / "x.log")
    assert not (tmp_path / "started").exists()


def test_a_lost_record_of_the_stages_is_said_once_and_the_stages_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import pathlib, sys; d = pathlib.Path(sys.argv[1]); (d / 'x').touch()"
    output = tmp_path / "out"
    plan = StagePlan(
        *("convert", "c", (Command(("python3", "-c", code, str(partial(output)))),), Resources(), (), output),
        log=tmp_path / "logs" / "convert.log",
    )
    monkeypatch.setattr("launcher.runner.write_results", lambda file, results: full([]))
    (result,) = run_job([plan], Place().wrap, stages_file=tmp_path / "stages.json")
    assert result.state == "done" and (output / "x").exists()
    assert capsys.readouterr().err.count("cannot be recorded") == 1


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


def test_a_pipe_or_a_device_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.md")
    with pytest.raises(OSError, match="no regular file"):
        write_atomically(tmp_path / "report.md", "new content")
    assert (tmp_path / "report.md").is_fifo() and len(list(tmp_path.iterdir())) == 1
