"""What a deployment would leave behind if its supervisor were killed, and how that is swept away.

The supervisor notes in a small file beside the endpoint file what it is about to create. A helper process,
``python3 -m deployment.leftovers STATE``, waits for the supervisor's end and sweeps if that end was not
orderly; should the helper be killed too, the next start sweeps. Standard library only.

Everything that is swept is provably ours: the processes and shared-memory regions carry the unique prefix
of the note, and the note's supervisor is dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from deployment.processes import Process, command_line, descendants, kill_all, list_processes, look_up
from handover.durable import write_atomically
from handover.errors import ServerError

_PREFIX = re.compile(r"slipway-[0-9a-f]{12}-")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+-]+")
_SHARED_MEMORY = Path("/dev/shm")
_PROGRAMS = ("tritonserver", "triton_python_backend_stub")
_PROJECT = Path(__file__).resolve().parent.parent
_ORDERLY = b"stopped\n"


@dataclass(frozen=True)
class State:
    """The note beside the endpoint file.

    Attributes:
        place: boot of the machine and namespace of the pids; elsewhere they would mean other processes.
        pid, started: the supervisor (clock ticks since boot).
        prefix: of the names of the shared-memory regions; unique.
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


def create_state(endpoint: Path) -> State:
    """Make the private directory and write the note."""
    me = look_up(os.getpid())
    assert me is not None
    prefix = f"slipway-{uuid.uuid4().hex[:12]}-"
    # Triton puts this path into a shell command: a TMPDIR with other characters is not used.
    parent = tempfile.gettempdir() if _PLAIN_PATH.fullmatch(tempfile.gettempdir()) else "/tmp"
    directory = tempfile.mkdtemp(prefix=prefix, dir=parent)
    state = State(_place(), me.pid, me.started, prefix, directory, str(endpoint.absolute()))
    write_atomically(state_file(endpoint), json.dumps(asdict(state), indent=1) + "\n")
    return state


def read_state(endpoint: Path) -> State | None:
    """Read the note of an earlier deployment; None if there is none, or it is not readable as one."""
    try:
        return State(**json.loads(state_file(endpoint).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def sweep_earlier(endpoint: Path) -> bool:
    """Sweep what an earlier deployment with the same endpoint file left, if it was killed.

    Returns:
        Whether there was something to sweep.

    Raises:
        ServerError: that deployment is still running.
    """
    state = read_state(endpoint)
    if state is None or state.place != _place():
        endpoint.unlink(missing_ok=True)  # nobody shall take it for the one that is about to start
        return False
    supervisor = look_up(state.pid)
    if supervisor and supervisor.started == state.started and supervisor.is_running:
        raise ServerError(
            f"a deployment with the endpoint file {endpoint} is running already, pid {state.pid}",
            f"stop it (kill {state.pid}), or choose another results directory",
        )
    sweep(state)
    return True


def sweep(state: State) -> list[Process]:
    """Kill the deployment's processes and remove its shared memory and files.

    Returns:
        Processes that would not die.
    """
    remaining = kill_all(processes_of(state.prefix))
    remove_shared_memory(state.prefix)
    directory, endpoint = Path(state.directory), Path(state.endpoint)
    if _PREFIX.fullmatch(state.prefix) and directory.name.startswith(state.prefix):
        shutil.rmtree(directory, ignore_errors=True)
    for path in (endpoint, state_file(endpoint)):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return remaining


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
        note = state_file(Path(state.endpoint))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deployment.leftovers", str(note)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=_PROJECT,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Tell it that everything was stopped in good order, and wait for its end."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(_ORDERLY)
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired, ChildProcessError):
            self._process.wait(timeout=5)


def _wait_and_sweep(note: Path, supervisor: IO[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    state = State(**json.loads(note.read_text()))
    if supervisor.read() != _ORDERLY:  # the pipe closes when the supervisor ends, however it ends
        sweep(state)


def _place() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


if __name__ == "__main__":
    _wait_and_sweep(Path(sys.argv[1]), sys.stdin.buffer)
