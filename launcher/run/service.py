"""A server that a job runs beside its clients, or alone. Standard library only."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from handover.endpoint import RUN_VARIABLE, is_published
from launcher.run.steps import Step


class Service:
    """A server that runs.

    Args:
        start: starts it, with more variables.
        endpoint: its endpoint file, into which it writes a token that it is given.
        grace_s: that it has to end once it is told; then it is killed.
    """

    def __init__(self, start: Callable[..., Step], endpoint: Path, grace_s: float) -> None:
        self._start, self.endpoint, self.grace_s = start, endpoint, grace_s
        self._token = uuid.uuid4().hex
        self._is_restart_asked = False
        self._step = self._begin()

    def _begin(self) -> Step:
        return self._start(**{RUN_VARIABLE: self._token})

    def is_published(self) -> bool:
        """Whether it has published its endpoint file, and not withdrawn it."""
        return is_published(self.endpoint, self._token)

    def wait(self, timeout_s: float) -> int | None:
        """Exit status, or None if it still runs after that long; one that was killed shall not look as if it served."""
        if self._is_restart_asked:
            self._is_restart_asked = False
            self.stop()
            self._step = self._begin()
        status = self._step.wait(timeout_s)
        if status is not None and self.is_published():
            self.endpoint.unlink(missing_ok=True)
        return status

    @property
    def last_lines(self) -> str:
        """Return what it printed last."""
        return self._step.last_lines

    def stop(self) -> None:
        """End it; its supervisor cleans up after the server."""
        self._step.stop(self.grace_s, whole_group=False)

    def restart_at_hangup(self) -> None:
        """Take SIGHUP as the wish that it be started again, as routers have."""
        signal.signal(signal.SIGHUP, self._ask_to_restart)

    def _ask_to_restart(self, number: int, frame: FrameType | None) -> None:
        self._is_restart_asked = True
