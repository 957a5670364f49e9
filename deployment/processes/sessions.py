"""The processes of a server that starts children of its own: all of them are in the session that it began.

A server of another project names its children as it likes, and some overwrite their arguments and their environment.
What they cannot lose is the session, unless they leave it on purpose. A note in the deployment's private directory says
which session that is, so that whoever sweeps finds them too. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from deployment.processes.linux import Process, list_processes, look_up

_NOTE = ".session"
_MAPPED = re.compile(r" (/dev/shm/[^/\n]+)$", re.MULTILINE)
_DELETED = " (deleted)"


def note_session(directory: Path, leader: int) -> None:
    """Remember the session that a fresh process has begun, in the deployment's private directory."""
    process = look_up(leader)
    if process is not None:
        (directory / _NOTE).write_text(json.dumps({"session": leader, "started": process.started}))


def session_processes(directory: Path) -> list[Process]:
    """Find what runs in the session that was noted; empty where none was.

    The number of a session is not given to another process while one of its processes exists, and no process of it is
    older than the one that began it.
    """
    try:
        noted = json.loads((directory / _NOTE).read_text())
        session, started = int(noted["session"]), int(noted["started"])
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [each for each in list_processes() if each.session == session and each.started >= started]


def mapped_regions(processes: Iterable[Process]) -> set[Path]:
    """Find the shared-memory regions that processes have mapped and that still have a name."""
    found: set[Path] = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
            found |= {Path(name) for name in _MAPPED.findall(maps) if not name.endswith(_DELETED)}
    return found


def remove_regions(regions: Iterable[Path]) -> None:
    """Remove shared-memory regions whose processes have ended."""
    for region in regions:
        with contextlib.suppress(OSError):
            region.unlink()
