"""Files that are whole or not there, after a kill and after a power loss. Standard library only.

What is being written has a temporary name, ``.<name>.<8 hex digits>.slipway-tmp``, and gets its own by a rename, once
its content is on the disk. No other program makes such names: whatever has one may be removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

_TEMPORARY = re.compile(r"\.(?P<of>.+)\.[0-9a-f]{8}\.slipway-tmp", re.DOTALL)
_ATTEMPTS = 10
_SYNC_THREADS = 16  # disks merge the flushes of those who wait at the same time
_SYNC_FILE_RANGE_WRITE = 2  # <fcntl.h>
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # file systems that cannot do it for a directory


def temporary_beside(path: Path) -> Path:
    """Return a new name in the same directory, for what is to become a file or a directory of that path."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.slipway-tmp")


def is_temporary(name: str) -> bool:
    """Whether a file or directory of that name is one of ours that was never finished."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_temporaries(directory: Path, of: str | None = None) -> None:
    """Remove what killed processes left in a directory.

    Args:
        directory: where to look; not below it.
        of: name of the file or directory that they were to become; None: any.
    """
    for entry in list(os.scandir(directory)):
        named = _TEMPORARY.fullmatch(entry.name)
        if named and of in (None, named["of"]):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)


def write_atomically(path: Path, content: str) -> None:
    """Write a small text file so that a reader sees the old content or the new, never a part.

    What earlier writers of the same file left, because they were killed, is removed. That may hit one that is alive:
    it finds its temporary gone, and writes again.

    Raises:
        OSError: it cannot be written, or what is there is no file: a device or a pipe is never replaced by one.
    """
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "what is there is no regular file", str(path))
    for attempt in range(_ATTEMPTS):
        remove_temporaries(path.parent, of=path.name)
        temporary = temporary_beside(path)
        try:
            temporary.write_text(content)
            sync(temporary)
            os.replace(temporary, path)
            break
        except FileNotFoundError:
            if attempt == _ATTEMPTS - 1 or not path.parent.is_dir():
                raise
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    sync(path.parent)


def sync(path: Path | str) -> None:
    """Wait until a file's content, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def begin_sync(descriptor: int, offset: int = 0, size_bytes: int = 0) -> None:
    """Have the disk begin with what was written to a file, without waiting for it.

    Nothing is durable by that: it leaves less to do for ``sync``, which has to follow. Where the system or the file
    system cannot do it, nothing happens.

    Args:
        descriptor: of the file.
        offset: of the first byte.
        size_bytes: how many; 0: to the end of the file.
    """
    if call := _sync_file_range():
        call(descriptor, ctypes.c_int64(offset), ctypes.c_int64(size_bytes), _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Callable[..., int] | None:
    """The system's call, looked up once: a conversion begins with thousands of files."""
    return getattr(ctypes.CDLL(None), "sync_file_range", None)


def sync_tree(root: Path) -> None:
    """Wait until everything below a directory is on the disk: first the files, each once, then the lists of names."""
    directories = [folder for folder, _, _ in os.walk(root)]
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        for paths in (_files_below(root), reversed(directories)):
            for _ in pool.map(sync, paths):
                pass


def _files_below(root: Path) -> Iterator[str]:
    """Yield one path of each file; hard links to the same one are left out."""
    seen = set()
    for folder, _, names in os.walk(root):
        for name in names:
            found = os.lstat(path := os.path.join(folder, name))
            if stat.S_ISREG(found.st_mode) and (found.st_dev, found.st_ino) not in seen:
                seen.add((found.st_dev, found.st_ino))
                yield path


def make_directory(path: Path) -> None:
    """Make a directory and what is missing above it, and wait until all of that is on the disk."""
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        sync(directory.parent)


def rename_durably(source: Path, target: Path) -> None:
    """Rename within a directory, and wait until that is on the disk."""
    os.rename(source, target)
    sync(target.parent)


def discard(directory: Path) -> None:
    """Remove a directory of ours; a kill in the middle leaves a temporary, never a half of what it was."""
    temporary = temporary_beside(directory)
    rename_durably(directory, temporary)
    shutil.rmtree(temporary)
