"""The running server of an engine: started, watched, stopped, with nothing left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from deployment.processes import adopt_orphans, die_with_parent, kill_all, reap_orphans
from deployment.sessions import mapped_regions, note_session, remove_regions, session_processes
from deployment.stopped import STOPPED_S, StoppedProcesses
from deployment.supervise import GRACE_S, ServerDiedError, describe, last_lines, word_of_crash_signal
from handover.errors import ServerError

_LONGEST_PLACE = 60
_OUR_SIGNALS = (signal.SIGTERM, signal.SIGKILL)


class EngineServer:
    """One server with its children.

    Args:
        title: the engine's name, for messages.
        argv: its command line.
        environment: all of its variables.
        directory: private; its working directory, and where its session is noted.
        log: file that receives what it prints.
        is_again: it is started in place of one that has died, whose log is continued.

    Raises:
        ServerError: the program cannot be started.
    """

    def __init__(
        self,
        title: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        log: Path,
        is_again: bool,
    ) -> None:
        adopt_orphans()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._title, self._log, self._directory = title, log, directory
        self._stopped = StoppedProcesses()
        with log.open("ab" if is_again else "wb") as stream:
            try:
                self._process = subprocess.Popen(
                    argv,
                    cwd=directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # its children are found by it; Ctrl-C is for us
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise ServerError(
                    f"{title} cannot be started: {argv[0]}: {error.strerror}",
                    "give the program in deployment.command, such as /path/to/venv/bin/vllm serve",
                ) from error
        note_session(directory, self._process.pid)

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
        """End the server: SIGTERM, SIGKILL to all of its processes if that takes longer than the time-out and 3 s more.

        Args:
            exit_timeout_s: for requests in flight; below 0: the 3 s are so much shorter; None: SIGKILL at once.

        Returns:
            The server's exit status. Its children and the shared memory that they had mapped are gone then.
        """
        regions = mapped_regions(session_processes(self._directory))
        if exit_timeout_s is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, exit_timeout_s + GRACE_S))
        remaining = session_processes(self._directory)
        regions |= mapped_regions(remaining)
        kill_all(remaining)
        try:
            status = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:  # a process that even SIGKILL does not end waits for a device or a disk
            raise ServerError(f"{self._title}, pid {self._process.pid}, cannot be killed") from None
        reap_orphans()
        remove_regions(regions)
        return status

    def word_of_crash(self, status: int) -> str:
        """Return how the server ended where that was by a signal that the supervisor did not send; empty otherwise."""
        return f"{self._title} {describe(status)}" if status < 0 and -status not in _OUR_SIGNALS else ""

    def find_crash(self) -> str:
        """Return whether the server itself crashed; see ``Supervised``."""
        return word_of_crash_signal(self._title, self._process.poll())

    def explain(self, problem: str) -> ServerError:
        """Make an error that quotes the server's last lines."""
        return ServerError(problem + self._quoted_log())

    def _quoted_log(self) -> str:
        return f"\n  last lines of {self._log}:" + "".join(f"\n    {line}" for line in last_lines(self._log))


def environment_of(directory: Path) -> dict[str, str]:
    """Variables of the server: ours, with its temporary files in the private directory, which ends with it.

    Not where that has a long path: engines put sockets there, whose paths Linux limits to 107 bytes. What torch
    compiles stays where it would be without this, so that the next start finds it.
    """
    if len(str(directory)) > _LONGEST_PLACE:
        return dict(os.environ)
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    return {"TORCHINDUCTOR_CACHE_DIR": str(compiled), **os.environ, "TMPDIR": str(directory)}
