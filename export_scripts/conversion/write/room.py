"""Room in memory for the first file of weights, made while the conversion is still being planned.

A tmpfs clears each page that a file gets, and lets one process at a time do so for a file: more than half of what
writing one file costs, while planning keeps one processor busy. What is made has no name before it is taken: of a
conversion that is refused or killed nothing is left. Disks give room without touching it, and have none made here.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from export_scripts.arguments import HUGGINGFACE, ConvertArguments

_TMPFS = 0x01021994  # <linux/magic.h>
_STEP_BYTES, _MOST_BYTES = 64 << 20, 1 << 30  # the latter takes about as long as planning
_LINKED = ".safetensors"  # files that mostly stay as they are, under another name
_SHARE = 2  # at most one in two bytes that are free
_SHRINKS = 2  # a quantized file is at most half of its source's size


class Room:
    """A file without a name, that grows until it is taken or closed.

    Args:
        directory: on whose file system it is.
        most_bytes: of it; nothing is made where that is less than a step.

    Raises:
        OSError: the file system has no files without names.
    """

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self.size_bytes = 0
        self._descriptor = -1
        self._ended = Event()
        self._thread: Thread | None = None
        if most_bytes >= _STEP_BYTES:
            self._descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE, 0o666)
            self._thread = Thread(target=self._grow, args=(most_bytes,))
            self._thread.start()

    def stop(self) -> int:
        """Stop growing and return its bytes."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        return self.size_bytes

    def take(self, path: Path, size_bytes: int) -> bool:
        """Set its size and link it under a name, once; return whether it could be, on the file system of that name."""
        self.stop()
        if self._descriptor < 0:
            return False
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.ftruncate(self._descriptor, size_bytes)
            os.link(f"/proc/self/fd/{self._descriptor}", path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except OSError:
            return False
        finally:
            os.close(directory)
            self.close()
        return True

    def close(self) -> None:
        """Free it, unless it has a name."""
        self.stop()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor, self.size_bytes = -1, 0

    def _grow(self, most_bytes: int) -> None:
        """Clear pages, in calls during which the interpreter plans."""
        allocate = ctypes.CDLL(None).fallocate
        while not self._ended.is_set() and self.size_bytes + _STEP_BYTES <= most_bytes:
            if allocate(self._descriptor, 0, ctypes.c_int64(self.size_bytes), ctypes.c_int64(_STEP_BYTES)):
                return
            self.size_bytes += _STEP_BYTES


NO_ROOM = Room(Path(), 0)


@contextmanager
def room_for(arguments: ConvertArguments) -> Iterator[Room]:
    """Begin with the room that a conversion to Hugging Face may need, where there is a processor for it."""
    room = NO_ROOM
    if arguments.format == HUGGINGFACE and len(os.sched_getaffinity(0)) > 1:
        output = arguments.output.absolute()
        directory = next(each for each in (output, *output.parents) if each.is_dir())
        with suppress(OSError):  # whatever is wrong with the files, planning says it better
            room = Room(directory, _wanted_bytes(arguments, directory))
    try:
        yield room
    finally:
        room.close()


def _wanted_bytes(arguments: ConvertArguments, directory: Path) -> int:
    """Bytes of a checkpoint's files, but for those that are linked, as far as there is memory for them."""
    if not _is_tmpfs(directory):
        return 0
    about = os.statvfs(directory)
    most_bytes = min(_MOST_BYTES, about.f_bavail * about.f_frsize // _SHARE)
    found, of_source = 0, most_bytes * (_SHRINKS if arguments.quantization else 1)
    walked = (os.path.join(folder, name) for folder, _, names in os.walk(arguments.checkpoint) for name in names)
    for path in (str(arguments.checkpoint),) if arguments.checkpoint.is_file() else walked:
        if arguments.quantization or not path.endswith(_LINKED):
            found += os.path.getsize(path)
        if found >= of_source:
            return most_bytes
    return found // (_SHRINKS if arguments.quantization else 1)


def _is_tmpfs(directory: Path) -> bool:
    """Whether a directory is in memory: the first word of what statfs says is the file system's kind."""
    said = (ctypes.c_long * 64)()
    return not ctypes.CDLL(None).statfs(os.fsencode(directory), said) and said[0] == _TMPFS
