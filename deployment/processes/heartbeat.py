"""A process that says again and again that it goes on, and whoever looks whether it does. Standard library only.

That it runs is not enough: its event loop may be caught in one request, or somebody has stopped it (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time

from deployment.processes.stopped import STOPPED_S
from deployment.processes.supervised import describe

_VARIABLE = "SLIPWAY_HEARTBEAT"
_EVERY_S = 1.0
_START_S = 120.0
"""For the first sign: until then it reads its modules and files."""
_LONGEST_LOOK_S = 1.0
"""Longest time between two looks that counts: the supervisor may have been stopped too, as by scontrol suspend."""


class Heartbeat:
    """The supervisor's end of a pipe into which a process that it starts writes."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self._silent_s, self._looked, self._most_s = 0.0, time.monotonic(), _START_S

    @property
    def files(self) -> tuple[int, ...]:
        """What the process inherits."""
        return (self._writing,)

    @property
    def variables(self) -> dict[str, str]:
        """What tells the process where to write."""
        return {_VARIABLE: str(self._writing)}

    def has_begun(self) -> None:
        """Leave the process alone with its end of the pipe."""
        os.close(self._writing)

    def is_missing(self) -> bool:
        """Look whether the process has been silent for 20 s."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked, _LONGEST_LOOK_S)
        self._looked = now
        with contextlib.suppress(BlockingIOError):
            if os.read(self._reading, 1 << 16):
                self._silent_s, self._most_s = 0.0, STOPPED_S
        return self._silent_s > self._most_s

    def close(self) -> None:
        """Forget the process."""
        os.close(self._reading)


def ending(process: subprocess.Popen[bytes], heartbeat: Heartbeat) -> str:
    """Return how a process has ended, which is killed if it stands still; empty: it goes on."""
    status = process.poll()
    if status is not None:
        return describe(status)
    if not heartbeat.is_missing():
        return ""
    process.kill()
    process.wait()
    return f"stood still for {STOPPED_S:g} s and was killed"


class Beating:
    """The process's end of the pipe; without one it does nothing."""

    def __init__(self) -> None:
        self._file = int(os.environ.pop(_VARIABLE, "-1"))
        if self._file >= 0:
            os.set_inheritable(self._file, False)
            os.set_blocking(self._file, False)

    def beat(self) -> None:
        """Report that this process goes on."""
        if self._file >= 0:
            with contextlib.suppress(OSError):  # the other end is full, or closed
                os.write(self._file, b".")

    async def go_on(self) -> None:
        """Report it for as long as the event loop goes on."""
        while True:
            self.beat()
            await asyncio.sleep(_EVERY_S)
