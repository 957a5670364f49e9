"""Whether a deployment has been asked to end. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is what srun passes on in good order


class StopRequest:
    """Whether and why the deployment shall end."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._signal = threading.Event()
        self.reason = ""

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopRequest]:
        """Take the signals as requests instead of dying of them."""
        previous = {number: signal.signal(number, self._receive) for number in _STOP_SIGNALS}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        self._signal.set()

    def came(self, timeout_s: float) -> bool:
        """Wait for a request for at most that long."""
        if self._signal.wait(timeout_s):
            return True
        if os.getppid() != self._parent:
            self.reason = "the parent process ended"
        return bool(self.reason)
