"""Tests that compare times of the clock, marked ``clock``: what they find counts while the machine let them run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

TRIES = 12
STALL_S = 0.01  # what is compared with the clock here lies some ten milliseconds from its limit
_TICK_S = 0.002


class Stalls:
    """The longest time for which a thread that wanted to run every other millisecond did not.

    Attributes:
        longest_s: seconds beyond what it had asked for.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._is_over = threading.Event()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch inside the block."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    def _watch(self) -> None:
        before_s = time.monotonic()
        while not self._is_over.wait(_TICK_S):
            now_s = time.monotonic()
            self.longest_s, before_s = max(self.longest_s, now_s - before_s - _TICK_S), now_s


def run_while_calm(test: Callable[..., object], arguments: dict[str, Any]) -> None:
    """Run a test, and again where it fails while others had the machine; what fails on a calm one fails at once.

    Each run has a ``tmp_path`` of its own.

    Raises:
        AssertionError: it failed although nothing stalled, or however often it was run.
    """
    for number in range(TRIES):
        given = dict(arguments)
        if number and "tmp_path" in given:
            given["tmp_path"] = given["tmp_path"] / f"again_{number}"
            given["tmp_path"].mkdir()
        stalls = Stalls()
        try:
            with stalls.watched():
                test(**given)
            return
        except AssertionError:
            if stalls.longest_s < STALL_S or number == TRIES - 1:
                raise
