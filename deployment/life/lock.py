"""One deployment at a time for each endpoint file. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from handover.errors import ServerError

_PATIENCE_S = 1.0  # a helper that sweeps holds the lock for a moment
_PAUSE_S = 0.05
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def lock(endpoint: Path, patience_s: float = _PATIENCE_S) -> Iterator[bool]:
    """Hold the lock of an endpoint file, from before the proof of the weights until nothing of the deployment is left.

    The kernel releases it when this process ends, however it ends, and no child inherits it. It belongs to a file
    beside the endpoint file, so a copy of a results directory has a lock of its own, and a moved one keeps its.

    Args:
        endpoint: whose directory exists.
        patience_s: seconds to wait for the lock.

    Yields:
        Whether it is held: False on a file system without locks, where the note of ``leftovers`` must do.

    Raises:
        ServerError: another process holds it.
    """
    file = endpoint.with_name(f".{endpoint.name}.lock")
    descriptor = _take(file, endpoint, time.monotonic() + patience_s)
    try:
        if descriptor is not None:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield descriptor is not None
    finally:
        if descriptor is not None:
            file.unlink(missing_ok=True)  # before it is let go: whoever waits for this file takes another then
            os.close(descriptor)


def _take(file: Path, endpoint: Path, deadline: float) -> int | None:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(file, descriptor):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise _refusal(endpoint, os.pread(descriptor, 200, 0).decode(errors="replace")) from None
            time.sleep(_PAUSE_S)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _NO_LOCKS:
                return None
            raise
        os.close(descriptor)


def _is_there(file: Path, descriptor: int) -> bool:
    """Whether the file that is locked is the one that others find: its last holder may just have removed it."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _refusal(endpoint: Path, holder: str) -> ServerError:
    kill = f"kill {holder.split()[1]}, " if holder.startswith("pid ") else ""
    return ServerError(
        f"a deployment with the endpoint file {endpoint} is running already, {holder or 'by another process'}",
        f"stop it ({kill}or end its job), or choose another results directory",
    )
