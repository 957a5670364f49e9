"""A program that a launcher starts beside the process that joins MPI's ranks: TensorRT-LLM over several nodes.

``trtllm-llmapi-launch`` is a shell script: it does not end with the program where that fails, and a signal ends it
alone. So the program itself is looked for among its processes, watched, and asked to end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deployment.engines.leading_servers import LeadingServer
from deployment.processes.linux import Process, command_line
from deployment.processes.sessions import session_processes
from deployment.processes.supervised import GRACE_S, ServerDiedError
from deployment.ranks.gathered import Gathered

_POLL_S = 0.1


class LaunchedServer(LeadingServer):
    """The first process's server.

    Args:
        starter: first words of the command line, which launch the program.
        gathered, title, argv, given: see ``LeadingServer``.
    """

    def __init__(
        self, starter: Sequence[str], gathered: Gathered, title: str, argv: Sequence[str], *given: Any
    ) -> None:
        self._starter = Path(starter[0]).name
        self._words = list(argv[len(starter) + 1 :])  # of a script the command line begins by its interpreter
        self._program: Process | None = None
        super().__init__(gathered, title, argv, *given)

    def check(self) -> None:
        """Look once, at the program too.

        Raises:
            ServerDiedError: it has ended, whatever has launched it.
        """
        super().check()
        if self._program is None:
            self._program = self._find_program()
        elif not self._program.is_running:
            raise ServerDiedError(f"{self._title} has ended, and {self._starter} has not{self._quoted_log()}")

    def _find_program(self) -> Process | None:
        """Find the process with the program's words that no other of them has started."""
        found = {}
        for process in session_processes(self._directory):
            line = command_line(process.pid)
            if line[-len(self._words) :] == self._words and self._starter not in {Path(word).name for word in line}:
                found[process.pid] = process
        return next((process for process in found.values() if process.parent not in found), None)

    def _end_within(self, timeout_s: float) -> None:
        """Ask the program to end; what launched it follows where that was in good order."""
        if self._program is None:
            return super()._end_within(timeout_s)
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):
            os.kill(self._program.pid, signal.SIGTERM)
        while self._program.is_running and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, min(GRACE_S, deadline - time.monotonic())))
