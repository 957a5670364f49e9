"""A child process beside the server: started with it, started again where it dies or hangs, and stopped with it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from deployment.processes.heartbeat import Heartbeat, ending
from deployment.processes.linux import die_with_parent
from deployment.processes.restarts import MOST_RESTARTS, Restarts
from deployment.processes.supervised import ServerDiedError, describe, last_lines
from handover.arguments import ScriptArguments
from handover.errors import ServerError

_PROJECT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 60.0


class WatchedProcess(ABC):
    """A module of the project in a process of its own.

    Args:
        module: that is run.
        arguments: of it.
        log: file to which its output is added.
        name: for messages.
        short_name: where the name has been said.
    """

    def __init__(self, module: str, arguments: ScriptArguments, log: Path, name: str, short_name: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments.to_argv()]
        self._log, self._name, self._short_name = log, name, short_name
        self._restarts = Restarts()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._heartbeat = Heartbeat()
        with self._log.open("ab") as stream:
            process = subprocess.Popen(
                self._command,
                cwd=_PROJECT,
                env={**os.environ, **self._heartbeat.variables},
                pass_fds=self._heartbeat.files,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the supervisor, which stops this one in good order
                preexec_fn=die_with_parent,
            )
        self._heartbeat.has_begun()
        return process

    @abstractmethod
    def is_up(self) -> bool:
        """Ask it whether it takes requests; an OSError says that it does not."""

    def wait_until_up(self, is_stopped: Callable[[float], bool], silence: str) -> None:
        """Wait until it takes requests, or the deployment is asked to stop.

        Args:
            is_stopped: waits for that many seconds; returns whether it is to stop.
            silence: what is wrong if it does not take any.

        Raises:
            ServerDiedError: it ended, such as for a port that is taken.
            ServerError: it does not take requests in time.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while not is_stopped(0.05):
            if (status := self._process.poll()) is not None:
                raise ServerDiedError(f"{self._name} {describe(status)}{self._quoted_log()}")
            with contextlib.suppress(OSError):
                if self.is_up():
                    return
            if time.monotonic() > deadline:
                raise ServerError(f"{self._name} {silence}{self._quoted_log()}")

    def watch(self) -> str:
        """Start it again if it has died or hangs; the server and its other clients go on meanwhile.

        Returns:
            What happened, for the operator; empty: it runs.

        Raises:
            ServerDiedError: it has died too often.
        """
        ended = ending(self._process, self._heartbeat)
        if not ended:
            return ""
        number = self._restarts.take()
        if number is None:
            problem = f"{self._name} {ended}, for the fourth time within ten minutes"
            raise ServerDiedError(problem + self._quoted_log())
        self._heartbeat.close()
        self._process = self._start()
        return f"{self._short_name} {ended}; started again, {number} of {MOST_RESTARTS} within ten minutes"

    def stop(self, patience_s: float) -> None:
        """End it; what it does has that many seconds, and none where it is 0."""
        if patience_s > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        self._process.kill()
        self._process.wait()
        self._heartbeat.close()

    def _quoted_log(self) -> str:
        return "".join(f"\n    {line}" for line in last_lines(self._log))
