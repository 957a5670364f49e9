"""A step of a Slurm allocation: started again for a while where Slurm's controller is away. Standard library only."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGTERM, Signals

from handover.slurm_queue import CONTROLLER_AWAY
from launcher.run import console
from launcher.run.process import Child

_PATIENCE_S, _PAUSE_S = 600.0, 5.0
_NEVER_STARTED = re.compile(
    rf"srun: error: Unable to (?:confirm allocation|create step) for job \d+: {CONTROLLER_AWAY.pattern}"
)
"""What srun says where no controller answers, as while one is restarted or another takes over."""


class Step:
    """A running command; one that never started, as the controller was away, is started again.

    Args:
        argv, env, log, stop_signals: see ``Child``.
    """

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], log: Path, stop_signals: Sequence[Signals] = (SIGTERM,)
    ) -> None:
        self._arguments = argv, env, log, stop_signals
        self._child = Child(*self._arguments)
        self._give_up_at: float | None = None
        self._again_at: float | None = None

    def wait(self, timeout_s: float) -> int | None:
        """Exit status, or None if it still runs, or waits to be started again, after that long."""
        if self._again_at is not None:
            left_s = self._again_at - time.monotonic()
            if left_s > timeout_s:
                time.sleep(timeout_s)
                return None
            time.sleep(max(0.0, left_s))
            self._again_at, self._child = None, Child(*self._arguments)
        status = self._child.wait(timeout_s)
        if not status or not self._is_another_due():
            return status
        self._again_at = time.monotonic() + _PAUSE_S
        return None

    def stop(self, grace_s: float, whole_group: bool = True) -> int:
        """End it, see ``Child``; it is not started again."""
        self._again_at, self._give_up_at = None, 0.0
        return self._child.stop(grace_s, whole_group)

    @property
    def last_lines(self) -> str:
        """The last lines that it printed."""
        return self._child.last_lines

    def _is_another_due(self) -> bool:
        lines = self._child.last_lines.splitlines()
        if not any(map(_NEVER_STARTED.match, lines)) or not all(line.startswith("srun: ") for line in lines):
            return False
        if self._give_up_at is None:
            self._give_up_at = time.monotonic() + _PATIENCE_S
            console.say_error(f"Slurm's controller is away: trying again for {_PATIENCE_S / 60:.0f} minutes")
        return time.monotonic() < self._give_up_at
