"""What a deployment that was killed has left, and what must not be taken for that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deployment import leftovers
from deployment.leftovers import create_state, read_state, state_file, sweep_earlier
from deployment.processes import command_line, descendants, look_up
from handover.errors import ServerError

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def endpoint(tmp_path: Path) -> Path:
    return tmp_path / "endpoint.json"


def _ended_pid() -> tuple[int, int]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = look_up(child.pid)
    assert process is not None
    child.communicate()
    return process.pid, process.started


def _rewrite(endpoint: Path, **changes: object) -> None:
    note = state_file(endpoint)
    note.write_text(json.dumps({**json.loads(note.read_text()), **changes}))


def test_a_running_deployment_with_the_same_endpoint_is_not_disturbed(endpoint: Path) -> None:
    state = create_state(endpoint)
    region = Path("/dev/shm") / f"{state.prefix}region"
    region.write_bytes(b"x")
    try:
        with pytest.raises(ServerError, match=f"running already, pid {os.getpid()}"):
            sweep_earlier(endpoint)
        assert region.exists()
    finally:
        leftovers.sweep(state)
    assert not region.exists() and not Path(state.directory).exists() and read_state(endpoint) is None


def test_what_a_killed_deployment_left_is_swept(endpoint: Path) -> None:
    state = create_state(endpoint)
    region = Path("/dev/shm") / f"{state.prefix}region"
    region.write_bytes(b"x")
    endpoint.write_text("{}")
    pid, started = _ended_pid()
    _rewrite(endpoint, pid=pid, started=started)
    assert sweep_earlier(endpoint)
    left = [path for path in (region, Path(state.directory), endpoint, state_file(endpoint)) if path.exists()]
    assert left == []
    assert not sweep_earlier(endpoint)


def test_a_reused_pid_is_not_taken_for_the_supervisor(endpoint: Path) -> None:
    state = create_state(endpoint)
    _rewrite(endpoint, started=state.started - 1)  # our own pid, but of a process that started earlier
    assert sweep_earlier(endpoint)
    assert not Path(state.directory).exists()


def test_a_note_of_another_boot_or_without_sense_is_left_alone(endpoint: Path, tmp_path: Path) -> None:
    state = create_state(endpoint)
    _rewrite(endpoint, place="another boot")
    assert not sweep_earlier(endpoint)
    assert Path(state.directory).is_dir()
    state_file(endpoint).write_text("not JSON")
    assert not sweep_earlier(endpoint)
    leftovers.sweep(state)


@pytest.mark.parametrize("prefix", ["", "slipway-", "triton_", "slipway-0123456789ab-/../"])
def test_only_names_with_our_unique_prefix_are_swept(endpoint: Path, tmp_path: Path, prefix: str) -> None:
    state = create_state(endpoint)
    foreign = Path("/dev/shm") / f"triton_test_{os.getpid()}"
    foreign.write_bytes(b"x")
    directory = tmp_path / "slipway-precious"
    directory.mkdir()
    pid, started = _ended_pid()
    _rewrite(endpoint, pid=pid, started=started, prefix=prefix, directory=str(directory))
    try:
        assert sweep_earlier(endpoint)
        assert foreign.exists() and directory.exists()
    finally:
        foreign.unlink()
        leftovers.sweep(state)


def _named_program(tmp_path: Path, name: str, argument: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [str(tmp_path / name), "-c", "import time; time.sleep(60)", argument], executable=sys.executable
    )


def test_processes_are_found_by_program_and_prefix_only(endpoint: Path, tmp_path: Path) -> None:
    state = create_state(endpoint)
    ours = _named_program(tmp_path, "tritonserver", f"--x={state.prefix}")
    bystanders = [
        _named_program(tmp_path, "less", f"--x={state.prefix}"),
        _named_program(tmp_path, "tritonserver", "--x=other"),
    ]
    try:
        deadline = time.monotonic() + 5
        while not command_line(ours.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert leftovers.sweep(state) == []
        assert ours.wait(20) == -signal.SIGKILL
        assert [process.poll() for process in bystanders] == [None, None]
    finally:
        for process in (ours, *bystanders):
            process.kill()
            process.wait()


def test_the_helper_sweeps_when_its_supervisor_is_killed(endpoint: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from deployment.leftovers import Sweeper, create_state\n"
        "state = create_state(Path(sys.argv[1])); Path('/dev/shm', state.prefix + 'region').write_bytes(b'x')\n"
        "sweeper = Sweeper(state); print(state.prefix, flush=True); time.sleep(60)"
    )
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, str(endpoint)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert supervisor.stdout
    prefix = supervisor.stdout.readline().strip()
    helpers = [process for process in descendants([supervisor.pid]) if process.pid != supervisor.pid]
    supervisor.kill()
    supervisor.wait()
    deadline = time.monotonic() + 10
    while state_file(endpoint).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not state_file(endpoint).exists()
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    assert len(helpers) == 1
    while helpers[0].is_running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not helpers[0].is_running
