"""The processes of a server that starts children of its own: all of them are in the session that it began.

A server of another project names its children as it likes, and some overwrite their arguments and their environment.
What they cannot lose is the session, unless they leave it on purpose. A note in the deployment's private directory says
which session that is, so that whoever sweeps finds them too. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from deployment.processes.linux import Process, command_line, kill_all, list_processes, look_up

_NOTE = ".session"
_SHARED_MEMORY = Path("/dev/shm")
_MAPPED = re.compile(r"^\S+ \S+ \S+ (\w+):(\w+) (\d+) +/dev/shm/", re.MULTILINE)  # man 5 proc: device, inode
_TRACKER = "from multiprocessing.resource_tracker import main"
_TRACKER_S = 5.0


def note_session(directory: Path, leader: int, name: str) -> None:
    """Remember the session that a fresh process has begun, in the deployment's private directory.

    Args:
        directory: of the deployment.
        leader: the process.
        name: of the program: started again, it has another session.
    """
    process = look_up(leader)
    if process is not None:
        note = json.dumps({"session": leader, "started": process.started})
        (directory / f"{_NOTE}.{name}").write_text(note)


def session_processes(directory: Path) -> list[Process]:
    """Find what runs in the sessions that were noted; empty where none was.

    The number of a session is not given to another process while one of its processes exists, and no process of it is
    older than the one that began it.
    """
    sessions: dict[int, int] = {}
    for note in directory.glob(f"{_NOTE}.*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = json.loads(note.read_text())
            sessions[int(noted["session"])] = int(noted["started"])
    return [each for each in list_processes() if each.started >= sessions.get(each.session, math.inf)]


def kill_session(processes: Iterable[Process]) -> list[Process]:
    """SIGKILL the processes of a session; returns those that have not ended.

    Python's resource trackers come last. Once all others have ended, each removes the semaphores and the shared memory
    that these had named, also where the one that did so had died before, and no process has them mapped. Then it ends.
    """
    found = list(processes)
    trackers = [each for each in found if any(word.startswith(_TRACKER) for word in command_line(each.pid))]
    remaining = kill_all(each for each in found if each not in trackers)
    deadline = time.monotonic() + _TRACKER_S
    while any(each.is_running for each in trackers) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [*remaining, *kill_all(trackers)]


def mapped_regions(processes: Iterable[Process]) -> set[Path]:
    """Find the shared-memory regions and semaphores that processes have mapped and that still have a name.

    They are compared by their inode: a semaphore is mapped by another name, which is deleted once it has its own.
    """
    mapped = set[tuple[int, int]]()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            for major, minor, inode in _MAPPED.findall(maps):
                mapped.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    found = set[Path]()
    for region in _SHARED_MEMORY.iterdir() if mapped else ():
        with contextlib.suppress(OSError):
            status = region.stat()
            found |= {region} if (status.st_dev, status.st_ino) in mapped else set()
    return found


def remove_regions(regions: Iterable[Path]) -> None:
    """Remove shared-memory regions whose processes have ended."""
    for region in regions:
        with contextlib.suppress(OSError):
            region.unlink()
