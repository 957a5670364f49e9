"""What a deployment would leave behind if its supervisor were killed, and how that is swept away.

The supervisor notes in a small file beside the endpoint file what it is about to create. A helper process,
``python3 -m deployment.life.leftovers ENDPOINT``, is given the same note, waits for the supervisor's end and sweeps if
that end was not orderly; should the helper be killed too, the next start sweeps: of the same deployment, or, as the
private directory holds the note too, of any on the node. Standard library only.

Everything that is swept is provably ours: the processes and shared-memory regions carry the unique prefix of the note,
and the note's supervisor is dead. Files beside the endpoint file are removed by whoever holds its lock, and only those
that carry the prefix too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from deployment.doors.restriction import header_file
from deployment.life.lock import lock
from deployment.processes.linux import Process, command_line, descendants, kill_all, list_processes, look_up
from deployment.processes.sessions import kill_session, mapped_regions, remove_regions, session_processes
from handover.durable import write_atomically
from handover.endpoint import deployment_of
from handover.errors import ServerError

_PREFIX = re.compile(r"slipway-[0-9a-f]{12}-")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+-]+")
_SHARED_MEMORY = Path("/dev/shm")
_INNER_NOTE = ".state"
_PROGRAMS = ("tritonserver", "triton_python_backend_stub")
_PROJECT = Path(__file__).resolve().parents[2]
_FAREWELL_S = 5
_ORDERLY = b"stopped\n"


@dataclass(frozen=True)
class State:
    """The note beside the endpoint file.

    Attributes:
        place: boot of the machine and namespace of the pids; elsewhere they would mean other processes.
        pid, started: the supervisor (clock ticks since boot).
        prefix: of the names of the shared-memory regions; unique, so it also names the deployment.
        directory: private temporary directory with the backends.
        endpoint: the endpoint file.
    """

    place: str
    pid: int
    started: int
    prefix: str
    directory: str
    endpoint: str


def state_file(endpoint: Path) -> Path:
    """Path of the note that belongs to an endpoint file."""
    return endpoint.with_name(f".{endpoint.name}.state")


def rendezvous_file(endpoint: Path) -> Path:
    """File in which rank 0 tells the others where it is, beside its endpoint file."""
    return endpoint.with_name(f".{endpoint.name}.ranks")


def create_state(endpoint: Path) -> State:
    """Write the note, then make the private directory that it names: whatever ends this, no directory is left unnoted.

    Raises:
        OSError: one of the two cannot be made; then neither is there.
    """
    me = look_up(os.getpid())
    assert me is not None
    prefix = f"slipway-{uuid.uuid4().hex[:12]}-"
    directory = os.path.join(_temporary_place(), f"{prefix}{secrets.token_hex(4)}")
    state = State(_place(), me.pid, me.started, prefix, directory, str(endpoint.absolute()))
    note = json.dumps(asdict(state), indent=1) + "\n"
    write_atomically(state_file(endpoint), note)
    try:
        os.mkdir(directory, 0o700)
        (Path(directory) / _INNER_NOTE).write_text(note)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        state_file(endpoint).unlink(missing_ok=True)
        raise
    return state


def _temporary_place() -> str:
    """Where private directories are made; Triton puts such a path into a shell command, so it is a plain one."""
    return tempfile.gettempdir() if _PLAIN_PATH.fullmatch(tempfile.gettempdir()) else "/tmp"


def read_state(endpoint: Path) -> State | None:
    """Read the note of an earlier deployment; None if there is none, or it is not readable as one."""
    return _read_note(state_file(endpoint))


def _read_note(note: Path) -> State | None:
    try:
        return State(**json.loads(note.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def sweep_earlier(endpoint: Path) -> bool:
    """Sweep what an earlier deployment with the same endpoint file left, if it was killed; the lock must be held.

    Returns:
        Whether there was something to sweep.

    Raises:
        ServerError: that deployment is still running (it holds no lock where the file system has none).
    """
    state = read_state(endpoint)
    is_ours = state is not None and state.place == _place()
    if state and is_ours and _is_supervised(state):
        if state.endpoint == str(endpoint.absolute()):
            raise ServerError(
                f"a deployment with the endpoint file {endpoint} is running already, pid {state.pid}",
                f"stop it (kill {state.pid}), or choose another results directory",
            )
        is_ours = False  # these results were copied while that deployment served: it is the original's
        state_file(endpoint).unlink()
        header_file(endpoint).unlink(missing_ok=True)
    endpoint.unlink(missing_ok=True)  # no client shall take it for the one that is about to start
    if not state or not is_ours:
        return False
    sweep(state)
    remove_files(endpoint, state.prefix)
    return True


def sweep_node() -> int:
    """Sweep what killed deployments of this user have left on this node, whatever results they served.

    Returns:
        How many there were.
    """
    count = 0
    for note in Path(_temporary_place()).glob(f"slipway-*/{_INNER_NOTE}"):
        state = _read_note(note)
        try:
            is_own = state is not None and Path(state.directory) == note.parent and note.stat().st_uid == os.getuid()
        except FileNotFoundError:  # another deployment that starts has just swept it
            continue
        if not state or not is_own or state.place != _place() or _is_supervised(state):
            continue
        sweep(state)
        with contextlib.suppress(ServerError, OSError), lock(Path(state.endpoint)):
            remove_files(Path(state.endpoint), state.prefix)
        count += 1
    return count


def _is_supervised(state: State) -> bool:
    """Whether the supervisor of a deployment on this machine runs."""
    supervisor = look_up(state.pid)
    return supervisor is not None and supervisor.started == state.started and supervisor.is_running


def sweep(state: State) -> list[Process]:
    """Kill the deployment's processes and remove its shared memory and its private directory.

    Returns:
        Processes that would not die.
    """
    directory = Path(state.directory)
    is_own = bool(_PREFIX.fullmatch(state.prefix)) and directory.name.startswith(state.prefix)
    others = session_processes(directory) if is_own else []
    regions = mapped_regions(others)
    remaining = [*kill_all(processes_of(state.prefix)), *kill_session(others)]
    remove_shared_memory(state.prefix)
    remove_regions(regions)
    if is_own:
        shutil.rmtree(directory, ignore_errors=True)
    return remaining


def withdraw(endpoint: Path, prefix: str) -> bool:
    """Remove the endpoint file if it is that of the deployment with this prefix; say whether it was."""
    is_own = deployment_of(endpoint) == prefix
    if is_own:
        endpoint.unlink(missing_ok=True)
    return is_own


def remove_files(endpoint: Path, prefix: str) -> None:
    """Remove what a deployment has put beside its endpoint file, and that file itself; the lock must be held."""
    withdraw(endpoint, prefix)
    state = read_state(endpoint)
    if state and state.prefix == prefix:
        for file in (header_file(endpoint), rendezvous_file(endpoint), state_file(endpoint)):
            file.unlink(missing_ok=True)


def processes_of(prefix: str) -> list[Process]:
    """Find server and stubs by the unique prefix in their arguments, and everything below them."""
    roots: list[int] = []
    if not _PREFIX.fullmatch(prefix):
        return []
    for process in list_processes():
        argv = command_line(process.pid)
        if argv and Path(argv[0]).name in _PROGRAMS and any(prefix in argument for argument in argv):
            roots.append(process.pid)
    return descendants(roots) if roots else []


def remove_shared_memory(prefix: str) -> None:
    """Remove the regions whose names carry the prefix."""
    if not _PREFIX.fullmatch(prefix):
        return
    for region in _SHARED_MEMORY.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            region.unlink()


class Sweeper:
    """The helper process: it outlives the supervisor by a moment, whatever kills the supervisor."""

    def __init__(self, state: State) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deployment.life.leftovers", state.endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=_PROJECT,
            start_new_session=True,
        )
        assert self._process.stdin
        # Not by the note: another deployment's may have taken its place when this one's is needed.
        self._process.stdin.write(json.dumps(asdict(state)).encode() + b"\n")
        self._process.stdin.flush()

    def dismiss(self) -> None:
        """Tell it that everything was stopped in good order, and wait for its end."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(_ORDERLY)
            self._process.stdin.close()
        with contextlib.suppress(ChildProcessError):
            try:
                self._process.wait(timeout=_FAREWELL_S)
            except subprocess.TimeoutExpired:  # on a busy machine it may not even have begun
                self._process.kill()
                self._process.wait()


def _wait_and_sweep(endpoint: Path, supervisor: IO[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    state = State(**json.loads(supervisor.readline()))
    if supervisor.read() == _ORDERLY:  # the pipe closes when the supervisor ends, however it ends
        return
    sweep(state)
    with contextlib.suppress(ServerError, OSError), lock(endpoint):  # else the next deployment has swept the files
        remove_files(endpoint, state.prefix)


def _place() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path, help="file of what the supervisor may leave behind")
    _wait_and_sweep(parser.parse_args().state, sys.stdin.buffer)
