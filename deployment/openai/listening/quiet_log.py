"""The endpoint's log: one line a second at most, and nothing that a client has sent."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from handover.errors import shortened

_LOG = logging.getLogger("deployment.openai")
_OURS = "deployment."
_MOST_FRAMES = 6


class _OneASecond(logging.Filter):
    """Lets a record a second through, and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self._next, self._left_out = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written."""
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return False
        vars(record)["left_out"] = self._left_out
        self._next, self._left_out = now + 1, 0
        return True


class _OneLine(logging.Formatter):
    """Writes a failure as its kind and place. What it says may quote a prompt or a key, and so may other libraries."""

    def format(self, record: logging.LogRecord) -> str:
        """Write a line."""
        is_ours = record.name.startswith(_OURS)
        text = record.getMessage() if is_ours else f"{record.name}: {str(record.msg).partition(chr(10))[0]}"
        kind, _, place = record.exc_info or (None, None, None)
        shown = shortened(text) + (describe(kind, place) if kind else "")
        left_out = getattr(record, "left_out", 0)
        more = f" ({left_out} more messages left out)" if left_out else ""
        return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {record.levelname.lower()}: {shown}{more}"


def describe(kind: type[BaseException], place: TracebackType | None) -> str:
    """Return what an exception is and where it was raised, without what it says."""
    frames = traceback.extract_tb(place)[-_MOST_FRAMES:]
    shown = " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames))
    return f": {kind.__name__} at {shown or 'an unknown place'}"


def keep_log_quiet() -> None:
    """Write everything that this process logs in this way."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_OneASecond())
    handler.setFormatter(_OneLine())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    sys.unraisablehook = lambda given: _log("an object could not be ended", given.exc_type, given.exc_traceback)
    threading.excepthook = lambda given: _log("a thread has failed", given.exc_type, given.exc_traceback)


def log_of_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what an event loop cannot raise anywhere; an ``exception_handler`` of asyncio."""
    error = context.get("exception")
    _log(str(context.get("message")), type(error) if error else None, error.__traceback__ if error else None)


def _log(text: str, kind: type[BaseException] | None, place: TracebackType | None) -> None:
    _LOG.error("%s%s", text, describe(kind, place) if kind else "")
