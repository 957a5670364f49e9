"""A file of an artefact in the making: temporary until it is whole, digested as it is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from export_scripts.conversion.write.journal import Journal
from export_scripts.tensors.dtypes import Array
from handover.digests import CRC32_BLOCKS, SHA256, new_digest
from handover.durable import begin_sync, temporary_beside
from handover.errors import ArtefactError
from handover.manifest import FileRecord

# Given to the kernel in one call, as cp does. For more, ext4 takes larger pages of memory, and those a virtual machine
# gets from its host only when they are touched: 2 MiB at a time took two to five times the processor time.
_WRITE_BYTES = 256 << 10


def write_at(descriptor: int, content: memoryview, offset: int) -> None:
    """Write all of a content at its place in a file."""
    while content:
        count = os.pwrite(descriptor, content[:_WRITE_BYTES], offset)
        content, offset = content[count:], offset + count


@contextmanager
def full_disk_explained(path: Path) -> Iterator[None]:
    """Turn a full disk into one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ArtefactError(
            f"the disk is full: {path.name} could not be written to {path.parent} ({error.strerror})",
            "free some space; the next run continues where this one stopped",
        ) from error


class ShardFile:
    """A file that is written under a temporary name and digested; it gets its own when it is published.

    Args:
        path: its own name.
        shape: of the tensor that it holds; None: it holds none.
        data_type: fp32, fp16 or bf16, of that tensor.

    Raises:
        ArtefactError: on any write, if the disk is full.
    """

    def __init__(self, path: Path, shape: tuple[int, ...] | None = None, data_type: str | None = None) -> None:
        self._path = path
        self._temporary = temporary_beside(path)
        self._shape, self._data_type = shape, data_type
        self._algorithm = SHA256 if shape is None else CRC32_BLOCKS
        self._digest = new_digest(self._algorithm)
        self._size_bytes = 0

    def __enter__(self) -> ShardFile:
        with full_disk_explained(self._path):
            self._stream = self._temporary.open("wb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, values: Array) -> None:
        """Append values in row-major order."""
        content = values.reshape(-1).view(np.uint8).data
        self._digest.update(content)
        with full_disk_explained(self._path):
            write_at(self._stream.fileno(), content, self._size_bytes)
        self._size_bytes += len(content)

    def publish(self, journal: Journal) -> FileRecord:
        """Note the file in the journal, then give it its name."""
        digest = f"{self._algorithm}:{self._digest.hexdigest()}"
        record = FileRecord(self._path.name, self._size_bytes, digest, self._shape, self._data_type)
        with full_disk_explained(self._path):
            begin_sync(self._stream.fileno())
            self._stream.close()
            journal.add(record)
            os.replace(self._temporary, self._path)
        return record
