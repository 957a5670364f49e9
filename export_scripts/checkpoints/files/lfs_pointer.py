"""The small texts that git-lfs keeps in place of large files.

Format: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md, "The Pointer": lines ``<key> <value>``, the version
first, less than 1,024 bytes in all.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from handover.errors import CheckpointError

POINTER_BYTES = 1024
"""A pointer is shorter than this."""
_POINTER = re.compile(
    rb"version https://[a-z-]+\.github\.com/spec/v[0-9]+\n(?P<extensions>(?:ext-[^\n]*\n)*)"
    rb"oid sha256:(?P<sha256>[0-9a-f]{64})\nsize (?P<size>[0-9]{1,19})\n?"
)


@dataclass(frozen=True)
class Pointer:
    """What a pointer says of the file that it stands for.

    Attributes:
        sha256: of the file that git-lfs stores, 64 hexadecimal digits.
        size_bytes: of the same.
        is_stored_otherwise: extensions change the file before git-lfs stores it, so the digest is not the file's own.
    """

    sha256: str
    size_bytes: int
    is_stored_otherwise: bool


def parse_pointer(content: bytes) -> Pointer | None:
    """Read a pointer; None: the bytes are something else."""
    found = _POINTER.fullmatch(content) if len(content) < POINTER_BYTES else None
    if found is None:
        return None
    return Pointer(found["sha256"].decode(), int(found["size"]), bool(found["extensions"]))


def refuse_pointer(path: Path, content: bytes) -> None:
    """Refuse a pointer in place of the file that it stands for.

    Args:
        path: the file.
        content: its first bytes, up to ``POINTER_BYTES``.

    Raises:
        CheckpointError: it is a pointer.
    """
    if pointer := parse_pointer(content):
        raise CheckpointError(
            f"{path} is a git-lfs pointer: the file itself, of {pointer.size_bytes} bytes, was not fetched",
            f"fetch it, and all others that git-lfs keeps: git -C {shlex.quote(str(path.parent))} lfs pull",
        )
