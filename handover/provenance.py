"""By which code something was made."""

from __future__ import annotations

import subprocess
from pathlib import Path

VERSION = "0.1.0"
_ROOT = Path(__file__).resolve().parent.parent


def read_commit() -> str:
    """Return the checkout's commit, ``<hex>`` or ``<hex>-dirty``; empty outside a git checkout."""
    head = _git("rev-parse", "HEAD")
    if not head:
        return ""
    return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head


def made_by() -> dict[str, str]:
    """Project, version and commit, as a manifest records them."""
    return {"project": "slipway", "version": VERSION, "commit": read_commit()}


def _git(*arguments: str) -> str:
    try:
        finished = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return finished.stdout.strip()
