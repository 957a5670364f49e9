"""Read mapped arrays by plain reads: where an array lies in its file, and its bytes in a buffer that is used again.

A memory-mapped array is a fine description of bytes that are not read yet: file, offset, shape and strides, through any
number of views. Touching it is another matter: it costs a page fault every few pages, and a file that shrinks
meanwhile, or a disk that fails, ends the process with SIGBUS. ``pread`` gives an error instead.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from export_scripts.tensors.array_of_pieces import ArrayOfPieces, box_around, parts_of, pieces_beneath
from export_scripts.tensors.computed import Computed
from export_scripts.tensors.dtypes import Array
from export_scripts.tensors.read_sums import ReadSums
from handover.digests import crc32, crc32_combine
from handover.errors import CheckpointError

# Bytes are read in one go up to this many times those wanted: still quicker than many calls.
_WASTE = 2
_ALIGNMENT = 64
# Read and summed up at a time: it is still in the cache when the second follows the first.
_PIECE_BYTES = 1 << 20
# Of what is only copied: read, checked, summed up and written while it lies in the second-level cache.
RUN_BYTES = 512 << 10
_EARLY_RUNS = 1024  # of a record, that are summed up before what lies before them
_OPEN_FILES = 16  # that stay open: pieces of a tensor are read from several by turns


RecordKey = tuple[str, int, int]
"""A record's file, offset and size in bytes."""


class Record(np.memmap[Any, Any]):
    """A range of a file, mapped, with its checksum.

    Attributes:
        crc32: of the range's bytes; None: not known.
    """

    crc32: int | None = None


def map_record(path: Path, offset: int, size_bytes: int, crc32: int | None = None) -> Array:
    """Map a range of a file, read-only, as bytes.

    Args:
        path: the file.
        offset: of the range's first byte.
        size_bytes: of the range.
        crc32: its checksum, if that is known; it is compared when the range is read.

    Raises:
        CheckpointError: the file is missing or ends before the range does.
    """
    try:
        record = Record(path, np.uint8, mode="r", offset=offset, shape=(size_bytes,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", "copy the checkpoint again") from error
    record.crc32 = crc32
    return record


class Reader:
    """Reads mapped arrays into one buffer and keeps the checksums of what it reads. One for each thread.

    Args:
        capacity_bytes: of the buffer; what does not fit is allocated.
        verified: records that were found whole, by file, offset and size; the threads share it.
        read_sums: takes note of all that is read; None: nothing has to.
    """

    def __init__(self, capacity_bytes: int, verified: set[RecordKey], read_sums: ReadSums | None = None) -> None:
        self._files: dict[str, int] = {}
        self._buffer = np.empty(capacity_bytes, np.uint8)
        self._used_bytes = 0
        self._verified = verified
        self._read_sums = read_sums
        self._sums: dict[RecordKey, _RunningSum] = {}

    def forget(self) -> None:
        """Use the buffer again: what was read since the last time is no longer valid."""
        self._used_bytes = 0

    def read(self, view: Array | Computed) -> Array:
        """Read what a view shows; the result has its shape, and in memory the order that the bytes have in the file.

        What is not mapped is returned as it is.

        Raises:
            CheckpointError: the file has become shorter or cannot be read.
        """
        if isinstance(view, Computed):
            # Apart: what is read of a base without a gap has a checksum without one.
            return view.values(self.read(view.base), *(Reader(0, self._verified).read(each) for each in view.beside))
        if (whole := pieces_beneath(view)) is not None and view.size:
            return self._gather(whole, view)
        record = _record(view)
        if record is None or not view.size or min(view.strides, default=0) < 0:
            return view
        axes = sorted((axis for axis in range(view.ndim) if view.shape[axis] > 1), key=lambda axis: view.strides[axis])
        inner = _dense_axes(view, axes)
        run_bytes = _span(view, axes[:inner])
        outer = axes[inner:][::-1]  # the farthest apart first
        strides = list(view.strides)
        step = run_bytes if not outer else -(-run_bytes // _ALIGNMENT) * _ALIGNMENT
        for axis in reversed(outer):
            strides[axis], step = step, step * view.shape[axis]
        buffer = self._take(step)
        offset = _offset(record, view)
        file = self._opened(record)
        for index in product(*(range(view.shape[axis]) for axis in outer)):
            start = sum(i * strides[axis] for i, axis in zip(index, outer, strict=True))
            at = offset + sum(i * view.strides[axis] for i, axis in zip(index, outer, strict=True))
            self._read_run(file, buffer[start : start + run_bytes], at, record)
        return np.ndarray(view.shape, view.dtype, buffer.data, strides=tuple(strides))

    def runs(self, view: Array) -> Iterator[Array]:
        """Read what a view shows a little at a time, as bytes; each run is valid until the next is read.

        Args:
            view: its bytes lie together in a file, in its own order; see ``is_mapped``.

        Raises:
            CheckpointError: the file has become shorter or cannot be read.
        """
        record = _record(view)
        assert record is not None, "is_mapped has been asked"
        self.forget()
        buffer, offset = self._take(RUN_BYTES), _offset(record, view)
        end, file = offset + view.nbytes, self._opened(record)
        while offset < end:
            run = buffer[: min(RUN_BYTES, end - offset)]
            self._read_run(file, run, offset, record)
            yield run
            offset += run.size

    def _gather(self, whole: ArrayOfPieces, view: Array) -> Array:
        """Read what a view shows of an array whose pieces lie in many places."""
        box = box_around(whole, view)
        if prod(box.shape) > _WASTE * view.size:  # its outermost rows lie far apart
            result = np.empty_like(view, order="K", subok=False)
            axis = max(range(view.ndim), key=lambda axis: (view.shape[axis] > 1) * view.strides[axis])
            for index in range(view.shape[axis]):
                place = (*(slice(None),) * axis, slice(index, index + 1))
                result[place] = self._gather(whole, view[place])
            return result
        values = self._take(prod(box.shape) * view.itemsize).view(view.dtype).reshape(box.shape)
        used_bytes = self._used_bytes
        for place, piece in box.pieces():
            for part in parts_of(piece, _PIECE_BYTES):  # a little at a time: it lies in the buffer beside the box
                values[place][part] = self.read(piece[part])
                self._used_bytes = used_bytes
        return box.shown(values)

    def verify(self, view: Array | Computed) -> None:
        """Compare the checksum of the record that a view shows a part of, or of those that it is scattered over.

        Raises:
            CheckpointError: the record's bytes are not those that were saved.
        """
        if isinstance(view, Computed):
            for stored in (view.base, *view.beside):
                self.verify(stored)
            return
        if (whole := pieces_beneath(view)) is not None:
            for _, piece in box_around(whole, view).pieces() if view.size else ():
                self.verify(piece)
            return
        record = _record(view)
        wanted = getattr(record, "crc32", None)
        if record is None or wanted is None or _key(record) in self._verified:
            return
        total = self._sums.pop(_key(record), None)
        if total is None or total.end != record.offset + record.nbytes:
            total = self._sum_all(record)
        # Once another thread has found the record whole, nothing more is added to this one's sum.
        if total.value != wanted and _key(record) not in self._verified:
            raise CheckpointError(
                f"{record.filename} is damaged: its bytes {record.offset} to {record.offset + record.nbytes} have the "
                f"checksum {total.value:08x}, they were saved with {wanted:08x}",
                "copy the checkpoint again",
            )
        self._verified.add(_key(record))

    def _sum_all(self, record: np.memmap[Any, Any]) -> _RunningSum:
        """Read a record once more from its start: what was wanted of it was not all of it, or not in order."""
        self._sums[_key(record)] = total = _RunningSum(record.offset)
        self.forget()
        buffer = self._take(min(_PIECE_BYTES, record.nbytes))
        file = self._opened(record)
        for start in range(0, record.nbytes, _PIECE_BYTES):
            self._read_run(file, buffer[: record.nbytes - start], record.offset + start, record)
        del self._sums[_key(record)]
        return total

    def _opened(self, record: np.memmap[Any, Any]) -> int:
        """Open a record's file; those of the last records stay open."""
        name = str(record.filename)
        if name not in self._files:
            if len(self._files) == _OPEN_FILES:
                self._close()
            try:
                self._files[name] = os.open(name, os.O_RDONLY)
            except OSError as error:
                raise CheckpointError(f"cannot read {name}: {error.strerror}") from error
        return self._files[name]

    def _close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def __del__(self) -> None:
        self._close()

    def _read_run(self, file: int, run: Array, offset: int, record: np.memmap[Any, Any]) -> None:
        """Fill a buffer from a file."""
        total = None
        if getattr(record, "crc32", None) is not None and _key(record) not in self._verified:
            total = self._sums.setdefault(_key(record), _RunningSum(record.offset))
        done = 0
        while done < run.size:
            try:
                count = os.preadv(file, [run[done : done + _PIECE_BYTES].data], offset + done)
            except OSError as error:
                raise CheckpointError(f"cannot read {record.filename} at byte {offset + done}: {error}") from error
            if not count:
                raise CheckpointError(
                    f"{record.filename} ends at byte {offset + done}, while it is read", "copy the checkpoint again"
                )
            if total:
                total.add(run[done : done + count], offset + done)
            if self._read_sums:
                self._read_sums.add(str(record.filename), run[done : done + count].data, offset + done)
            done += count

    def _take(self, size_bytes: int) -> Array:
        start, end = self._used_bytes, self._used_bytes + -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._buffer.size:
            return np.empty(size_bytes, np.uint8)
        self._used_bytes = end
        return self._buffer[start : start + size_bytes]


class _RunningSum:
    """A checksum of what came, from the start; what came too early waits for what is before it.

    Attributes:
        end: of what is summed up, in the file.
        value: CRC-32.
    """

    def __init__(self, start: int) -> None:
        self.end = start
        self.value = 0
        self._early: dict[int, tuple[int, int]] = {}  # end and CRC-32 of runs, by their start

    def add(self, run: Array, offset: int) -> None:
        """Go on with the next bytes; others are kept in mind, unless they are many, or left out."""
        if offset == self.end:
            self.value = crc32(run.data, self.value)
            self.end += run.size
        elif offset > self.end and crc32_combine is not None and len(self._early) < _EARLY_RUNS:
            self._early[offset] = offset + run.size, crc32(run.data)
        while self.end in self._early and crc32_combine is not None:
            start, (self.end, following) = self.end, self._early.pop(self.end)
            self.value = crc32_combine(self.value, following, self.end - start)


def _record(view: Array) -> np.memmap[Any, Any] | None:
    """Find the mapping beneath a view; None: its memory is no file's."""
    base: Any = view
    while base is not None and not (isinstance(base, np.memmap) and isinstance(base.base, mmap.mmap)):
        base = getattr(base, "base", None)
    return base


def is_mapped(view: Array | Computed) -> bool:
    """Whether a view shows bytes of one file, and nothing has to be computed for it."""
    return isinstance(view, np.ndarray) and view.size > 0 and _record(view) is not None


def _offset(record: np.memmap[Any, Any], view: Array) -> int:
    """Place of a view's first byte in its file."""
    start: int = view.__array_interface__["data"][0] - record.__array_interface__["data"][0]
    return record.offset + start


def _key(record: np.memmap[Any, Any]) -> RecordKey:
    return sys.intern(str(record.filename)), record.offset, record.nbytes


def _dense_axes(view: Array, axes: Sequence[int]) -> int:
    """Count the innermost axes whose bytes lie so close together that they are read in one go."""
    for count in range(len(axes), 0, -1):
        wanted = view.itemsize * prod(view.shape[axis] for axis in axes[:count] if view.strides[axis])
        if _span(view, axes[:count]) <= _WASTE * wanted:
            return count
    return 0


def _span(view: Array, axes: Sequence[int]) -> int:
    """Bytes from the first element along some axes to the end of the last."""
    return view.itemsize + sum((view.shape[axis] - 1) * view.strides[axis] for axis in axes)
