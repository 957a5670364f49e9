"""What a draft model's passes cost: as much as its matrices are of the model's, or what they are found to take.

A small model's step takes longer than its matrices tell, because each of its operators is launched all the same. So
steps without drafts and passes of the draft model are timed; of each kind the shortest counts, for others have waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_FORGOTTEN = 1.02  # how much longer the shortest is taken for with each further one


class DraftCosts:
    """Costs in steps of the model, each in units of one of a single row.

    Args:
        reckoned: of a pass; 0: drafts take no pass, and nothing is timed.
        clock: gives seconds.
    """

    def __init__(self, reckoned: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._reckoned, self._clock = reckoned, clock
        self._step_s = self._pass_s = 0.0
        self._since: float | None = None

    @property
    def are_known(self) -> bool:
        """Whether a step without drafts has been timed, if that is needed."""
        return not self._reckoned or self._step_s > 0

    @property
    def of_pass(self) -> float:
        """What a pass takes, in steps of as many rows."""
        return max(self._reckoned, self._pass_s / self._step_s) if self._step_s else self._reckoned

    def begin_step(self, units: float) -> None:
        """Note that a step of some units begins, which ends the one before it."""
        if self._since is not None:
            self._step_s = _shortest(self._step_s, (self._clock() - self._since) / units)
        self._since = None

    def note_plain(self) -> None:
        """Note that the step has no drafts."""
        self._since = self._clock() if self._reckoned else None

    def time_passes(self, begun_s: float, units: float) -> None:
        """Note that passes of some units together were begun at a time of ``now``, and have ended."""
        self._pass_s = _shortest(self._pass_s, (self._clock() - begun_s) / units)

    def now(self) -> float:
        """Return the clock's time."""
        return self._clock()


def _shortest(known_s: float, seconds: float) -> float:
    return min(seconds, _FORGOTTEN * known_s) if known_s else seconds
