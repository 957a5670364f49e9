"""Work in forked processes: results, errors, and nothing that outlives the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from export_scripts.conversion.write.workers import Advance, run_all
from handover.errors import ArtefactError, CheckpointError

PROJECT = Path(__file__).resolve().parents[2]


def squared(number: int, advance: Advance) -> tuple[int, int]:
    advance(number)
    return number * number, os.getpid()


@pytest.mark.parametrize("processes", [1, 3])
def test_every_piece_is_done_once_and_its_bytes_are_counted(processes: int) -> None:
    counted: list[int] = []
    results = list(run_all(processes, 20, squared, counted.append))
    assert sorted(result for result, _ in results) == [n * n for n in range(20)]
    assert sum(counted) == sum(range(20))
    assert ({pid for _, pid in results} == {os.getpid()}) == (processes == 1)


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_comes_back_as_it_was_raised(processes: int) -> None:
    def fail(number: int, advance: Advance) -> int:
        if number == 3:
            raise CheckpointError("w overflows fp16", "convert with bf16")
        return number

    with pytest.raises(CheckpointError, match="w overflows fp16") as error:
        list(run_all(processes, 10, fail, lambda size_bytes: None))
    assert error.value.hint == "convert with bf16"


def test_a_killed_process_is_one_clear_error() -> None:
    def die(number: int, advance: Advance) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(ArtefactError, match="a process of the conversion was killed"):
        list(run_all(2, 4, die, lambda size_bytes: None))


def test_processes_end_with_a_parent_that_is_killed() -> None:
    program = (
        "import os, time\n"
        "from export_scripts.conversion.write.workers import run_all\n"
        "def wait(number, advance):\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    time.sleep(60)\n"
        "list(run_all(2, 2, wait, lambda size_bytes: None))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = {int(parent.stdout.readline()), int(parent.stdout.readline())}
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and any(is_running(pid) for pid in children):
        time.sleep(0.02)
    assert not [pid for pid in children if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
