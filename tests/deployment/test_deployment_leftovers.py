"""What a deployment that was killed has left, and what must not be taken for that."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from deployment.arguments import ServeArguments
from deployment.life import leftovers
from deployment.life.leftovers import create_state, read_state, state_file, sweep_earlier
from deployment.life.lock import lock
from deployment.processes.linux import command_line, descendants, look_up
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


def test_nothing_is_left_where_the_note_or_the_directory_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk under the results leaves no directory elsewhere; a full temporary one leaves no note."""
    for results_exist, temporary_exists in ((False, True), (True, False)):
        results, temporary = tmp_path / f"results-{results_exist}", tmp_path / f"temporary-{temporary_exists}"
        for folder, exists in ((results, results_exist), (temporary, temporary_exists)):
            if exists:
                folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        with pytest.raises(OSError):
            create_state(results / "endpoint.json")
        assert not list(temporary.glob("*")) and not list(results.glob(".*"))


def test_the_private_directory_is_its_owners_alone(endpoint: Path) -> None:
    state = create_state(endpoint)
    assert Path(state.directory).stat().st_mode & 0o777 == 0o700 and os.listdir(state.directory) == [".state"]
    assert Path(state.directory).name.startswith(state.prefix) and read_state(endpoint) == state
    leftovers.sweep(state)


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
        leftovers.remove_files(endpoint, state.prefix)
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


def test_what_was_killed_on_this_node_is_swept_by_whoever_starts_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's SIGKILL takes supervisor and helper at once; the next deployment there may be another run's."""
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    killed, copied, elsewhere, running = [create_state(tmp_path / f"{name}.json") for name in "abcd"]
    pid, started = _ended_pid()
    region = Path("/dev/shm") / f"{killed.prefix}region"
    region.write_bytes(b"x")
    for state in (killed, copied, elsewhere):
        notes = (state_file(Path(state.endpoint)), Path(state.directory) / ".state")
        place = "another boot" if state is elsewhere else state.place
        changes = {"pid": pid, "started": started, "place": place}
        for note in notes:
            note.write_text(json.dumps({**json.loads(note.read_text()), **changes}))
    Path(copied.directory).rename(copy := temporary / "slipway-copy")
    assert leftovers.sweep_node() == 1
    assert not region.exists() and not state_file(tmp_path / "a.json").exists()
    assert sorted(temporary.iterdir()) == sorted([copy, Path(elsewhere.directory), Path(running.directory)])
    assert read_state(tmp_path / "d.json") == running
    assert leftovers.sweep_node() == 0


def test_two_that_start_at_once_sweep_what_a_third_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has removed the directory after this one has read its note."""
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    killed = create_state(tmp_path / "a.json")
    read_note = leftovers._read_note

    def read_and_lose(note: Path) -> leftovers.State | None:
        state = read_note(note)
        shutil.rmtree(killed.directory)
        return state

    monkeypatch.setattr(leftovers, "_read_note", read_and_lose)
    assert leftovers.sweep_node() == 0


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
        deadline = time.monotonic() + 240
        while not command_line(ours.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert leftovers.sweep(state) == []
        assert ours.wait(240) == -signal.SIGKILL
        assert [process.poll() for process in bystanders] == [None, None]
    finally:
        for process in (ours, *bystanders):
            process.kill()
            process.wait()


def test_the_helper_sweeps_when_its_supervisor_is_killed(endpoint: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from deployment.life.leftovers import Sweeper, create_state\n"
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
    deadline = time.monotonic() + 240
    while state_file(endpoint).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not state_file(endpoint).exists()
    assert not list(Path("/dev/shm").glob(f"{prefix}*"))
    assert len(helpers) == 1
    while helpers[0].is_running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not helpers[0].is_running


def test_a_copy_of_results_that_are_served_belongs_to_no_deployment(endpoint: Path, tmp_path: Path) -> None:
    """The original's supervisor lives; the copy of its note says nothing about the copy."""
    state = create_state(endpoint)
    copy = tmp_path / "copy" / endpoint.name
    copy.parent.mkdir()
    endpoint.write_text(json.dumps({"deployment": state.prefix}))
    shutil.copy(endpoint, copy)
    shutil.copy(state_file(endpoint), state_file(copy))
    region = Path("/dev/shm") / f"{state.prefix}region"
    region.write_bytes(b"x")
    try:
        assert not sweep_earlier(copy)
        assert list(copy.parent.iterdir()) == []
        assert region.exists() and Path(state.directory).is_dir() and endpoint.exists() and read_state(endpoint)
    finally:
        region.unlink()
        leftovers.sweep(state)


def test_the_helper_of_one_deployment_does_not_touch_the_next_one(endpoint: Path) -> None:
    """Two with one endpoint file, where a file system has no locks: the second's note is there when the first dies."""
    first = create_state(endpoint)
    sweeper = leftovers.Sweeper(first)
    second = create_state(endpoint)
    endpoint.write_text(json.dumps({"deployment": second.prefix}))
    regions = [Path("/dev/shm") / f"{state.prefix}region" for state in (first, second)]
    for region in regions:
        region.write_bytes(b"x")
    process = sweeper._process
    assert process.stdin
    process.stdin.close()  # as at the supervisor's death
    assert process.wait(240) == 0
    try:
        assert [region.exists() for region in regions] == [False, True]
        assert [Path(state.directory).is_dir() for state in (first, second)] == [False, True]
        assert endpoint.exists() and read_state(endpoint) == second
    finally:
        regions[1].unlink()
        leftovers.sweep(second)


def test_only_ones_own_endpoint_file_is_removed(endpoint: Path) -> None:
    for content, own in (('{"deployment": "mine"}', True), ('{"deployment": "another"}', False), ("[]", False)):
        endpoint.write_text(content)
        assert leftovers.withdraw(endpoint, "mine") is own
        assert endpoint.exists() is not own


LOCKING = """
import sys, time
from pathlib import Path
from deployment.life.lock import lock
with lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def _holder(endpoint: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCKING, str(endpoint)], cwd=PROJECT, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout and holder.stdout.readline() == "held\n"
    return holder


def test_a_second_deployment_is_refused_before_its_weights_are_proved(endpoint: Path) -> None:
    """While the first one proves its weights there is no note and no endpoint file yet."""
    holder = _holder(endpoint)
    try:
        arguments = ServeArguments(endpoint.parent / "no repository", endpoint, endpoint.parent / "server.log")
        second = subprocess.run(
            [sys.executable, "-m", "deployment.serve", *arguments.to_argv()],
            cwd=PROJECT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert second.returncode == 1 and "Traceback" not in second.stderr
        assert f"{endpoint} is running already, pid {holder.pid} on {socket.gethostname()}" in second.stderr
        assert f"kill {holder.pid}" in second.stderr
    finally:
        holder.kill()
        holder.wait()


def test_a_lock_ends_with_its_holder_and_a_copy_has_its_own(endpoint: Path, tmp_path: Path) -> None:
    holder = _holder(endpoint)
    copy = tmp_path / "copy" / endpoint.name
    shutil.copytree(tmp_path, copy.parent, ignore=shutil.ignore_patterns("copy"))
    with lock(copy) as is_held:
        assert is_held
    with pytest.raises(ServerError, match="is running already"), lock(endpoint, patience_s=0):
        pass
    holder.kill()
    holder.wait()
    with lock(endpoint) as is_held:
        assert is_held
    assert not list(tmp_path.glob(".*.lock")) and not list(copy.parent.glob(".*.lock"))
