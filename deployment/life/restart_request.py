"""Asking a deployment to restart its servers: a file beside its endpoint file, which reaches it from every node.

Standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path

from handover.durable import write_atomically

_FAILED = "failed"


class RestartRequest:
    """The request, as both sides see it."""

    def __init__(self, endpoint: Path) -> None:
        self.file = endpoint.with_name(f".{endpoint.name}.restart")

    def make(self) -> None:
        """Ask for it."""
        write_atomically(self.file, "{}\n")

    def is_made(self) -> bool:
        """Whether it was asked for and is not done yet."""
        return self.file.exists() and self.failure() == ""

    def failure(self) -> str:
        """Return why it could not be done; empty: nothing was in the way so far."""
        try:
            return str(json.loads(self.file.read_text()).get(_FAILED, ""))
        except (OSError, ValueError, AttributeError):
            return ""

    def fail(self, problem: str) -> None:
        """Tell that it was begun and not finished."""
        write_atomically(self.file, json.dumps({_FAILED: problem}) + "\n")

    def forget(self) -> None:
        """Remove it: it is done, or there is no deployment to do it."""
        self.file.unlink(missing_ok=True)
