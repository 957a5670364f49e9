"""What every running server has: it is started with its log, ended, and quoted where something is wrong."""

from __future__ import annotations

import signal
import subprocess
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from deployment.processes.linux import adopt_orphans, die_with_parent, reap_orphans
from deployment.processes.stopped import StoppedProcesses
from handover.errors import ServerError

_TAIL_LINES = 15
GRACE_S = 3.0
"""What a server gets for its end beyond the time for requests in flight."""
_OUR_SIGNALS = (signal.SIGTERM, signal.SIGKILL)
CRASH_SIGNALS = (signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT)
"""By which a program ends that was not asked to; the killer of processes for lack of memory takes SIGKILL."""


class ServerDiedError(ServerError):
    """The server or one of its stubs ended, or stands still, without having been asked to; another start may help."""


class Supervised(ABC):
    """A server with its children.

    Args:
        title: its name, for messages.
        argv: its command line.
        environment: all of its variables.
        directory: its working directory.
        log: file that receives what it prints.
        is_again: it is started in place of one that has died, whose log is continued.
        hint: what to do where the program cannot be started.

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
        hint: str = "",
    ) -> None:
        adopt_orphans()
        log.parent.mkdir(parents=True, exist_ok=True)
        self._title, self._log = title, log
        with log.open("ab" if is_again else "wb") as stream:
            self._log_read_bytes = stream.tell()
            try:
                self._process = subprocess.Popen(
                    argv,
                    cwd=directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for us; we stop the server in good order
                    preexec_fn=die_with_parent,
                )
            except OSError as error:
                raise ServerError(f"{title} cannot be started: {argv[0]}: {error.strerror}", hint) from error
        self.pid, self._stopped = self._process.pid, StoppedProcesses()

    @abstractmethod
    def check(self) -> None:
        """Look whether it lives; ServerDiedError: it does not."""

    @abstractmethod
    def stop(self, exit_timeout_s: float | None) -> int:
        """End it, and return its exit status; nothing of it is left then.

        Args:
            exit_timeout_s: seconds for requests in flight, after SIGTERM and with 3 s more; below 0: the 3 s are so
                much shorter; None: SIGKILL at once, for a server whose stub is dead keeps its clients waiting for
                nothing.
        """

    def _wait_killed(self) -> int:
        """Wait for the end of what was killed; ServerError: it waits for a device or a disk."""
        try:
            status = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            raise ServerError(f"{self._title}, pid {self.pid}, cannot be killed") from None
        reap_orphans()
        return status

    def word_of_crash(self, status: int) -> str:
        """Return how the server ended where that was by a signal that the supervisor did not send; empty otherwise."""
        return f"{self._title} {describe(status)}" if status < 0 and -status not in _OUR_SIGNALS else ""

    def find_crash(self) -> str:
        """Return what ended by a signal of its own fault (SIGBUS, SIGSEGV, SIGABRT) before ``stop``, or empty."""
        status = self._process.poll()
        is_crash = status is not None and -status in CRASH_SIGNALS
        return f"{self._title} ended by {signal.Signals(-status).name}" if status is not None and is_crash else ""

    def explain(self, problem: str) -> ServerError:
        """Make an error that quotes the server's last lines."""
        return ServerError(problem + self._quoted_log())

    def _quoted_log(self) -> str:
        lines = "".join(f"\n    {self._shown(line)}" for line in last_lines(self._log))
        return f"\n  last lines of {self._log}:{lines}"

    def _shown(self, line: str) -> str:
        """Return a line of the log as it is quoted."""
        return line


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log that say something; Triton's tables do not."""
    try:
        with log.open(errors="replace") as stream:
            return list(deque((line.rstrip() for line in stream if line.strip() and line[0] not in "+|"), _TAIL_LINES))
    except OSError:
        return []


def describe(status: int) -> str:
    """Return how a process ended."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
