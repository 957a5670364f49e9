"""Whether a replica still computes: where nothing has come back from it for a while, only a real generation says."""

from __future__ import annotations

import time
from collections.abc import Callable

from deployment.life.background_probe import BackgroundProbe
from handover.errors import ServerError

_SILENT_S = 30.0


class Health:
    """What is known of a replica that serves.

    Args:
        probe: asks the replica itself for a generation of one token, with all the time that a start has.
    """

    def __init__(self, probe: Callable[[], BackgroundProbe]) -> None:
        self._ask = probe
        self._probe: BackgroundProbe | None = None
        self._heard, self._sent_bytes, self._failures = time.monotonic(), -1, 0

    def find_problem(self, sent_bytes: int | None) -> str:
        """Look once.

        A replica whose answers come, however slowly, is well: a probe may only wait behind many requests.

        Args:
            sent_bytes: what has come back from the replica; None: unknown, and it is asked again and again.

        Returns:
            What is wrong with it; empty: nothing is known to be.
        """
        now = time.monotonic()
        if sent_bytes is not None and sent_bytes != self._sent_bytes:
            self._sent_bytes, self._heard, self._probe, self._failures = sent_bytes, now, None, 0
        elif self._probe is None and now - self._heard > _SILENT_S:
            self._probe, self._heard = self._ask(), now
        elif self._probe is not None:
            try:
                if self._probe.is_done():
                    self._probe, self._heard, self._failures = None, now, 0
            except ServerError as error:
                self._probe, self._failures = None, self._failures + 1
                if self._failures > 1 or now - self._heard > _SILENT_S:
                    return error.problem
                self._heard = now
        return ""
