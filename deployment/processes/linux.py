"""Processes as Linux's /proc shows them, and what only the kernel can promise about them. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from handover.parent import end_with_parent

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36
_WAIT4 = b"61" if os.uname().machine == "x86_64" else b"260"  # the system call's number
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Process:
    """A process and when it started, so that a reused pid is not taken for it.

    Attributes:
        pid: process id.
        parent: pid of its parent at the time of looking.
        state: R, S, D, Z (ended, not yet waited for), X, ...
        started: clock ticks since boot.
        session: pid of the process that began its session; children inherit it.
    """

    pid: int
    parent: int
    state: str
    started: int
    session: int = field(default=0, compare=False)

    @property
    def is_running(self) -> bool:
        """Whether it still exists and has not ended."""
        now = look_up(self.pid)
        return now is not None and now.started == self.started and now.state not in "ZX"


def look_up(pid: int) -> Process | None:
    """Read one process; None if there is none."""
    if not (content := _read(f"{_PROC}/{pid}/stat")):
        return None
    fields = content[content.rindex(b")") + 2 :].split(None, 20)  # the name in parentheses may hold anything
    return Process(pid, int(fields[1]), fields[0].decode(), int(fields[19]), int(fields[3]))


def list_processes() -> list[Process]:
    """Read all processes."""
    found = (look_up(int(name)) for name in os.listdir(_PROC) if name.isdigit())
    return [process for process in found if process]


def read_ending(pid: int) -> tuple[str, int] | None:
    """Return name (its first 15 characters) and wait status of an ended process that none has waited for; else None."""
    try:
        content = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    name, fields = content[content.index(b"(") + 1 : content.rindex(b")")], content[content.rindex(b")") + 2 :].split()
    return (name.decode(errors="replace"), int(fields[49])) if fields[0] == b"Z" else None  # man 5 proc: exit_code


def awaited(pid: int) -> set[int]:
    """Return the children for whose end threads of a process wait at this moment, as far as the kernel tells."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for thread in os.listdir(f"{_PROC}/{pid}/task"):
            call = _read(f"{_PROC}/{pid}/task/{thread}/syscall").split(None, 2)
            if call and call[0] == _WAIT4:
                found.add(int(call[1], 16))
    return found


def _read(path: str) -> bytes:
    """Read a file of /proc; empty if there is none. pathlib takes twice as long, and hundreds are read at a time."""
    try:
        with open(path, "rb", buffering=0) as stream:
            return stream.read()
    except OSError:
        return b""


def descendants(pids: Iterable[int]) -> list[Process]:
    """Return the given processes that exist and everything below them."""
    processes = list_processes()
    wanted = set(pids)
    while more := {process.pid for process in processes if process.parent in wanted} - wanted:
        wanted |= more
    return [process for process in processes if process.pid in wanted]


def command_line(pid: int) -> list[str]:
    """Return the argv of a process; empty for one that has ended."""
    try:
        content = (_PROC / str(pid) / "cmdline").read_bytes()
    except OSError:
        return []
    return os.fsdecode(content).split("\0")[:-1]


def blank_argument(pid: int, secret: str) -> bool:
    """Overwrite a secret in a child's command line, which every user of this machine can read.

    Args:
        pid: of a child that has read its command line and does not look there any more.
        secret: as it stands in an argument.

    Returns:
        Whether it is gone; not every kernel lets a parent write to its child.
    """
    try:
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # man 5 proc: arg_start, arg_end
        with (_PROC / str(pid) / "mem").open("r+b", buffering=0) as memory:
            memory.seek(start)
            content = memory.read(end - start) or b""
            found = [match.start() for match in re.finditer(re.escape(secret.encode()), content)]
            for offset in found:
                memory.seek(start + offset)
                memory.write(b"x" * len(secret))
    except (OSError, ValueError, IndexError):
        return False
    return bool(found)


def kill_all(processes: Iterable[Process], timeout_s: float = 5) -> list[Process]:
    """SIGKILL processes and wait until they have ended; returns those that have not."""
    remaining = [process for process in processes if process.is_running]
    for process in remaining:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while remaining and time.monotonic() < deadline:
        time.sleep(0.02)
        remaining = [process for process in remaining if process.is_running]
    return remaining


def reap_orphans() -> None:
    """Wait for ended children, so that none stays in the process table."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent dies: stubs of a killed server are then ours to reap."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """End with the parent, in a fresh child, and leave SIGUSR1 to the parent.

    A Slurm step's signal reaches every process of the step.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    end_with_parent()
