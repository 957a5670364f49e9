"""Whether a deployment has been asked to end. Standard library only."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Iterator
from types import FrameType

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # the last is what srun passes on in good order


class StopRequest:
    """Whether and why the deployment shall end.

    A handler runs in the thread that waits, so the two share a pipe and no lock: the handler of a ``threading.Event``
    waits for ever where it interrupts the wait between taking and giving back the event's own lock.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.reason = ""

    def __del__(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

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
        with contextlib.suppress(BlockingIOError):  # the pipe is full of earlier requests
            os.write(self._writer, b"\0")

    def came(self, timeout_s: float) -> bool:
        """Wait for a request for at most that long."""
        if not self.reason:
            select.select([self._reader], [], [], timeout_s)
        if not self.reason and os.getppid() != self._parent:
            self.reason = "the parent process ended"
        return bool(self.reason)
