"""What a draft model's passes cost, and the steps that verify them: as much as is reckoned, or is found to be taken.

A small model's step takes longer than its matrices tell, because each of its operators is launched all the same; and a
step with drafts has work of its own, which is as much for one token as for several. So steps without drafts and passes
of the draft model are timed, of which the shortest counts, for others have waited; and steps with drafts, passes and
all, of which the middle one of the last few says what is missing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

_FORGOTTEN = 1.02  # how much longer the shortest is taken for with each further one
_LAST = 5  # steps with drafts that say what these take


class DraftCosts:
    """Costs in steps of the model, each in units of one of a single row.

    Args:
        reckoned: of a pass; 0: drafts take no pass, and nothing is timed.
        clock: gives seconds.

    Attributes:
        of_step: what a step with drafts takes beyond its tokens and passes.
    """

    def __init__(self, reckoned: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._reckoned, self._clock = reckoned, clock
        self._step_s = self._pass_s = self.of_step = 0.0
        self._since: float | None = None
        self._drafted_units = 0.0  # of the step that has begun; 0: it has no drafts
        self._beyond = deque[float](maxlen=_LAST)

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
            self._end_step(self._clock() - self._since, units)
        self._since, self._drafted_units = None, 0.0

    def _end_step(self, seconds: float, units: float) -> None:
        if not self._drafted_units:
            self._step_s = _shortest(self._step_s, seconds / units)
            return
        self._beyond.append(seconds / self._step_s - self._drafted_units)
        self.of_step = max(0.0, median(self._beyond))

    def note_arrival(self) -> None:
        """Note that a row arrives: until now no step may have run, and the next one has its prompt to run."""
        if self._drafted_units:
            self._since = None

    def note_plain(self) -> None:
        """Note that the step has no drafts."""
        self._since = self._clock() if self._reckoned else None

    def note_drafted(self, begun_s: float, step_units: float, pass_units: float) -> None:
        """Note that the step has drafts.

        Args:
            begun_s: when passes for them were begun, by ``now``; they have ended.
            step_units: of the step that verifies them.
            pass_units: of the passes together.
        """
        self._pass_s = _shortest(self._pass_s, (self._clock() - begun_s) / pass_units)
        if self._reckoned:
            self._since, self._drafted_units = begun_s, step_units + self.of_pass * pass_units

    def now(self) -> float:
        """Return the clock's time."""
        return self._clock()


def _shortest(known_s: float, seconds: float) -> float:
    return min(seconds, _FORGOTTEN * known_s) if known_s else seconds
