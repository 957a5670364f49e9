"""Files that a setting names are read only if they are regular files of a bounded size. Standard library only.

A device never ends, and a pipe without a writer never begins: both would hang their reader.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

DATA_BYTES = 2 << 30
"""Most of a data file; the largest that are known, ShareGPT's conversations, have a third of that."""
SETTINGS_BYTES = 4 << 20
"""Most of a file of settings, such as a prompt or limits, which people write."""


def read_bytes(path: Path, most_bytes: int = DATA_BYTES) -> bytes:
    """Read a whole file.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``most_bytes``.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as stream:
        found = os.fstat(number)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is a device, pipe or socket, not a regular file", str(path))
        # Files of /proc say that they are empty, so what is read is bounded too.
        content = b"" if found.st_size > most_bytes else stream.read(most_bytes + 1)
        if max(found.st_size, len(content)) > most_bytes:
            raise OSError(
                errno.EFBIG, f"it has more than {most_bytes >> 20} MiB, which none of its kind has", str(path)
            )
        return content


def read_text(path: Path, most_bytes: int = DATA_BYTES) -> str:
    """Read a whole file of UTF-8.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``most_bytes``.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, most_bytes).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def is_special(path: Path) -> bool:
    """Whether something exists at a path that is neither a file nor a directory: a device, a pipe, a socket."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
