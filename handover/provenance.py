"""By which code something was made."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

VERSION = "0.3.0"
"""Version of the project; the wheel takes it from here."""
CODE = "code"
"""Key of ``made_by``: digest of the sources, which tells edits apart that a commit does not know."""
_ROOT = Path(__file__).resolve().parent.parent
PROGRAM = "slipway" if (_ROOT / "cli.py").is_file() else "python main.py"
"""What its users type: the console command where the package is installed."""
_PACKAGES = ("models", "ft_format", "handover", "launcher", "export_scripts", "deployment", "evaluation", "backends")


def read_commit() -> str:
    """Return the checkout's commit, ``<hex>`` or ``<hex>-dirty``; empty outside a git checkout.

    An installed package has none, also where it lies within somebody's repository.
    """
    head = _git("rev-parse", "HEAD") if (_ROOT / ".git").exists() else ""
    if not head:
        return ""
    return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head


def made_by() -> dict[str, str]:
    """Project, version, commit and digest of the sources, as a manifest records them."""
    return {"project": "slipway", "version": VERSION, "commit": read_commit(), CODE: code_digest()}


def code_digest() -> str:
    """Digest the sources of all stages, ``sha256:<hex>``: outside a git checkout too, and with edits."""
    files = sorted(each for package in _PACKAGES for each in _sources(f"{_ROOT}/{package}"))
    return _digest_of(str(_ROOT), tuple(files))


def _sources(directory: str) -> Iterator[tuple[str, int, int]]:
    """Paths below a directory, with the time of each file's last change and its size."""
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _sources(entry.path)
            elif entry.name.endswith((".py", ".c")):
                found = entry.stat()
                yield entry.path, found.st_mtime_ns, found.st_size


@lru_cache(maxsize=1)
def _digest_of(root: str, files: tuple[tuple[str, int, int], ...]) -> str:
    """Digest files, which a run does for each of its stages: those that are as they were are read once."""
    digest = hashlib.sha256()
    for path, _, _ in files:
        with open(path, "rb") as stream:
            digest.update(f"{path[len(root) + 1 :]}\0".encode() + stream.read())
    return f"sha256:{digest.hexdigest()}"


def _git(*arguments: str) -> str:
    try:
        finished = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return finished.stdout.strip()
