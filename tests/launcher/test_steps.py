"""A step that never started, with a FAKE srun that says what Slurm 22.05 does; tests/slurm has a real controller."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launcher.run import steps
from launcher.run.steps import Step

AWAY = "srun: error: Unable to confirm allocation for job 7: Unable to contact slurm controller (connect failure)"
AWAY_TOO = "srun: error: Unable to create step for job 7: Socket timed out on send/recv operation"
REFUSED = "srun: error: Unable to create step for job 7: Requested node configuration is not available"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_PAUSE_S", 0.05)


def step(root: Path, *answers: str) -> Step:
    """What srun says at each attempt, and then it runs the command; each attempt is noted."""
    lines = [f"{number}) echo '{said}' >&2; exit 1;;" for number, said in enumerate(answers, 1)]
    count = f"echo try >> {root}/tries; case $(wc -l < {root}/tries) in"
    script = "\n".join((count, *lines, f"*) echo ran; touch {root}/ran;;", "esac"))
    return Step(["/bin/sh", "-c", script], {}, root / "log")


def status_of(running: Step) -> int:
    deadline = time.monotonic() + 240
    while (status := running.wait(0.05)) is None:
        assert time.monotonic() < deadline
    return status


def tries(root: Path) -> int:
    return len((root / "tries").read_text().splitlines())


def test_a_step_is_tried_again_while_the_controller_is_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = step(tmp_path, AWAY, AWAY_TOO)
    assert status_of(running) == 0 and (tmp_path / "ran").exists() and tries(tmp_path) == 3
    assert capsys.readouterr().err.count("Slurm's controller is away: trying again for 10 minutes") == 1


@pytest.mark.parametrize("said", [REFUSED, f"convert: no such file\n{AWAY}", "srun: error: node1: task 0: Killed"])
def test_what_has_run_or_is_refused_is_not_tried_again(tmp_path: Path, said: str) -> None:
    assert status_of(step(tmp_path, said)) == 1 and tries(tmp_path) == 1


def test_it_is_given_up_after_a_while_and_at_once_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = step(tmp_path, *[AWAY] * 9)
    assert stopped.wait(2) is None and stopped.stop(1) == 1 and stopped.wait(0.5) == 1 and tries(tmp_path) == 1
    monkeypatch.setattr(steps, "_PATIENCE_S", 0.0)
    assert status_of(step(tmp_path, *[AWAY] * 9)) == 1 and "Unable to confirm" in stopped.last_lines
