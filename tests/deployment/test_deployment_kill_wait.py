"""A server's end fits into the time that Slurm leaves between SIGTERM and SIGKILL."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from deployment.arguments import ServeArguments
from deployment.life.kill_wait import within_kill_wait
from deployment.triton.server import Server

SAID = "KeepAliveTime           = SYSTEM_DEFAULT\nKillOnBadExit           = 1\nKillWait                = {} sec\nx = 1"


@pytest.fixture
def arguments(tmp_path: Path) -> ServeArguments:
    return ServeArguments(tmp_path, tmp_path / "endpoint.json", tmp_path / "log", exit_timeout_s=10)


def scontrol(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a stand-in onto PATH; its words are those of Slurm 22.05."""
    (folder / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("environment", "script", "expected"),
    [
        ({"SLURM_JOB_ID": "7"}, f"echo '{SAID.format(30)}'", 10),
        ({"SLURM_JOB_ID": "7"}, f"echo '{SAID.format(9)}'", 5),
        ({"SLURM_JOB_ID": "7"}, f"echo '{SAID.format(2)}'", -2),
        ({"SLURM_JOB_ID": "7"}, "echo unable to contact the controller >&2; exit 1", 10),
        ({}, f"echo '{SAID.format(2)}'", 10),
    ],
)
def test_the_time_for_requests_fits(
    environment: dict[str, str],
    script: str,
    expected: float,
    arguments: ServeArguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scontrol(tmp_path, script, monkeypatch)
    assert within_kill_wait(arguments, environment).exit_timeout_s == expected


def test_a_job_without_slurms_programs_keeps_its_time(
    arguments: ServeArguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert within_kill_wait(arguments, {"SLURM_JOB_ID": "7"}) == arguments


def test_a_server_that_does_not_end_is_killed_within_a_killwait_of_2_s(
    arguments: ServeArguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol(tmp_path, f"echo '{SAID.format(2)}'", monkeypatch)
    given = within_kill_wait(arguments, {"SLURM_JOB_ID": "7"})
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); time.sleep(60)"
    log = tmp_path / "server.log"
    server = Server([sys.executable, "-uc", program], {}, tmp_path, log, "slipway-0123456789ab-")
    while "deaf" not in log.read_text():
        time.sleep(0.02)
    began = time.monotonic()
    assert server.stop(given.exit_timeout_s) == -signal.SIGKILL
    assert time.monotonic() - began < 2
