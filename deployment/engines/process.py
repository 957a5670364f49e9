"""The running server of an engine: started, watched, stopped, with nothing left of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from deployment.processes.sessions import kill_session, mapped_regions, note_session, remove_regions, session_processes
from deployment.processes.stopped import STOPPED_S
from deployment.processes.supervised import GRACE_S, ServerDiedError, Supervised, describe

_LONGEST_PLACE = 60


class EngineServer(Supervised):
    """One server with its children; its session is noted in its directory, which is private."""

    session = "engine"
    """Name of the note."""

    def __init__(
        self,
        title: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
        is_again: bool,
        hint: str = "give the program in deployment.command, such as /path/to/venv/bin/vllm serve",
    ) -> None:
        super().__init__(title, argv, environment, directory, log, is_again, hint)
        self._directory = directory
        note_session(directory, self.pid, self.session)

    @property
    def has_started(self) -> bool:
        """Whether it takes part already where others wait for it; a server that finds the others itself does."""
        return True

    def check(self) -> None:
        """Look once.

        Raises:
            ServerDiedError: the server ended, or one of its processes was stopped for 20 s.
        """
        status = self._process.poll()
        if status is not None:
            raise ServerDiedError(f"{self._title} {describe(status)}{self._quoted_log()}")
        for pid in self._stopped.find(session_processes(self._directory)):
            raise ServerDiedError(f"a process of {self._title} (pid {pid}) has been stopped for {STOPPED_S:g} s")

    def stop(self, exit_timeout_s: float | None) -> int:
        """End the server with its children and the shared memory that they had mapped."""
        regions = mapped_regions(session_processes(self._directory))
        if exit_timeout_s is not None and self._process.poll() is None:
            self._end_within(max(0.0, exit_timeout_s + GRACE_S))
        remaining = session_processes(self._directory)
        regions |= mapped_regions(remaining)
        kill_session(remaining)
        status = self._wait_killed()
        remove_regions(regions)
        return status

    def _end_within(self, timeout_s: float) -> None:
        """Ask the server to end, and wait for that."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


def environment_of(directory: Path) -> dict[str, str]:
    """Variables of the server: ours, with its temporary files in the private directory, which ends with it.

    Not where that has a long path: engines put sockets there, whose paths Linux limits to 107 bytes. What torch
    compiles stays where it would be without this, so that the next start finds it.
    """
    if len(str(directory)) > _LONGEST_PLACE:
        return dict(os.environ)
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(compiled), **os.environ, "TMPDIR": str(directory)}
