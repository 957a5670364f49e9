"""The one progress reporter of long steps: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import os
import sys
import threading
import time
from types import TracebackType

_LINE_EVERY_S = 10.0
_BAR_EVERY_S = 0.1
_UNITS = ("B", "KB", "MB", "GB", "TB")


def human_bytes(count: float) -> str:
    """Format a byte count with decimal units: ``4.1 GB``."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} {_UNITS[-1]}"


def human_time(seconds: float) -> str:
    """Format a duration: ``0:01:10``."""
    whole = int(seconds + 0.5)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class Progress:
    """Progress of one step, counted in items and, where they differ in size, in bytes.

    On a terminal one line is redrawn; otherwise a line is printed every ten seconds, so that a log
    stays readable. The runner sets SLIPWAY_TERMINAL=1 where it passes a terminal on through a pipe.

    Args:
        label: name of the step, in the first column.
        total: number of items.
        unit: plural name of an item: ``tensors``, ``samples``, ``points``.
        total_bytes: bytes of all items together, if the rate should be measured in bytes.
    """

    def __init__(self, label: str, total: int, unit: str, total_bytes: int | None = None) -> None:
        self.label, self.total, self.unit, self.total_bytes = label, total, unit, total_bytes
        self.done = 0
        self.done_bytes = 0
        self._skipped = self._skipped_bytes = 0
        self._lock = threading.Lock()
        self._terminal = sys.stderr.isatty() or os.environ.get("SLIPWAY_TERMINAL") == "1"
        self._started = time.monotonic()
        self._shown = self._started
        self._printed = -1

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            print(f"\r{self._line()}\x1b[K", file=sys.stderr, flush=True)
        elif kind is None and self._printed < self.done:
            print(self._line(), file=sys.stderr, flush=True)

    def skip(self, size_bytes: int = 0, items: int = 0) -> None:
        """Count what an earlier run finished: it is done, and says nothing of the rate."""
        self.done += items
        self.done_bytes += size_bytes
        self._skipped += items
        self._skipped_bytes += size_bytes

    def advance(self, items: int = 1, size_bytes: int = 0) -> None:
        """Count finished work and redraw if it is time; threads may share this."""
        with self._lock:
            self.done += items
            self.done_bytes += size_bytes
            now = time.monotonic()
            if now - self._shown >= (_BAR_EVERY_S if self._terminal else _LINE_EVERY_S):
                self._shown = now
                if self._terminal:
                    print(f"\r{self._line()}\x1b[K", end="", file=sys.stderr, flush=True)
                else:
                    self._printed = self.done
                    print(self._line(), file=sys.stderr, flush=True)

    def _line(self) -> str:
        elapsed = time.monotonic() - self._started
        if self.total_bytes:
            share, own_bytes = self.done_bytes / self.total_bytes, self.done_bytes - self._skipped_bytes
            size = f"  {human_bytes(self.done_bytes)} of {human_bytes(self.total_bytes)}"
            if elapsed > 0 and own_bytes:
                size += f"  {human_bytes(own_bytes / elapsed)}/s"
            remaining_s = elapsed * (self.total_bytes - self.done_bytes) / own_bytes if own_bytes else None
        else:
            share, own = self.done / self.total if self.total else 1.0, self.done - self._skipped
            size = ""
            remaining_s = elapsed * (self.total - self.done) / own if own else None
        remaining = "?" if remaining_s is None else human_time(max(0.0, remaining_s))
        when = f"in {human_time(elapsed)}" if self.done >= self.total else f"eta {remaining}"
        bar = "#" * int(share * 20) + "." * (20 - int(share * 20)) if self._terminal else f"{share:4.0%}"
        return f"      {self.label:<10} {bar}  {self.done}/{self.total} {self.unit}{size}  {when}"


def say(line: str) -> None:
    """Print one fact of a program that works for a while, such as a deployment."""
    print(f"      {line}", flush=True)
