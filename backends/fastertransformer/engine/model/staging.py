"""Copy files to a GPU at the rate of its link: several threads read ahead into pinned memory, which the GPU copies.

A file that is mapped and copied is transferred page by page, by one thread, through a buffer of the driver's, at a
fraction of the link's rate. Here threads read parts of the files, in the order in which the shards will be requested,
and each piece of a part is copied to the GPU while the next one is read. All pieces together stay in the processor's
cache, from which the GPU copies them. A thread that releases Python's global lock (GIL) waits for all other threads
afterwards, which took as long as reading. So each piece releases it once, to be read; the copy is started by the
driver's own function, which is called with the GIL held, where torch's would release it.

The columns of a matrix that a rank takes are pieces of its rows. They are copied out of the mapped file, for a call a
row would take longer than the row: of a row of 57 KB, an eighth. What lies between them is not read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from ..errors import WeightsError
from ..large_pages import large_pages
from .shards import Order, Piece, Shards, check_file

AHEAD_BYTES = 1 << 30  # prefetched at most; a larger file is read by itself
_PART_BYTES = 32 << 20  # what a thread reads of a file at a time
_PIECE_BYTES = 8 << 20
_THREADS = max(4, min(12, len(os.sched_getaffinity(0))))  # with 16 a load took longer
_cuda: Any = torch.cuda  # torch has no types for the functions that are used here
_BUFFERS = _THREADS + 4  # one for each thread, and some that are being copied


@dataclass
class _Buffer:
    """Pinned memory for a piece.

    Attributes:
        memory: [_PIECE_BYTES].
        view: of the memory, to read a file into.
        is_sent: event after which the memory may be overwritten; None: there is no GPU.
    """

    memory: Tensor
    view: memoryview
    is_sent: Any


class StagedFiles:
    """A context manager that gives the shards of a checkpoint on a device, in a given order.

    It starts to pin its memory in the background when it is constructed, while the caller still plans.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory, self._device = directory, device
        self._coming: deque[Piece] = deque()
        self._read: deque[tuple[Piece, Tensor, list[Future[None]]]] = deque()
        self._ahead_bytes = 0
        self._is_gpu = device.type == "cuda"
        self._stream: Any = _cuda.Stream(device) if self._is_gpu else None
        self._memory = large_pages(_BUFFERS * _PIECE_BYTES)  # which are pinned in a fraction of the time
        self._buffers = deque(map(self._buffer, self._memory.split(_PIECE_BYTES)))  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(_THREADS, "shards", self._begin_thread)
        self._pinned = self._pool.submit(self._pin)

    def __enter__(self) -> StagedFiles:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads, and wait for pending copies."""
        self._pool.shutdown(cancel_futures=True)
        if self._is_gpu and not (self._pinned.cancelled() or self._pinned.exception()):
            self._stream.synchronize()
            _cuda.check_error(_cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))

    def in_order(self, order: Order) -> Shards:
        """Return a source of shards that must be requested in this order."""
        self._coming.extend(order)
        return self._give

    def _give(self, piece: Piece) -> Tensor:
        while self._coming and (not self._read or self._ahead_bytes < AHEAD_BYTES):
            self._begin(self._coming.popleft())
        following, content, parts = self._read.popleft()
        assert following == piece, f"{piece} was requested, {following} is next"
        for part in parts:
            part.result()
        self._ahead_bytes -= content.nbytes
        if self._is_gpu:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return content.view(piece.dtype).view(piece.shape)

    def _begin(self, piece: Piece) -> None:
        """Start reading a piece of a file."""
        check_file(self._directory, piece)
        content = torch.empty(piece.size_bytes, dtype=torch.uint8, device=self._device)
        free = None
        if self._is_gpu:  # the memory may be that of a tensor which is still being used
            free = torch.cuda.current_stream(self._device).record_event()
        step = _whole_rows(_PART_BYTES, piece)
        parts = [
            self._pool.submit(self._bring, piece, start, content[start : start + step], free)
            for start in range(0, piece.size_bytes, step)
        ]
        self._read.append((piece, content, parts))
        self._ahead_bytes += piece.size_bytes

    def _bring(self, piece: Piece, start: int, target: Tensor, free: Any) -> None:
        """Read a part, and copy it to the device."""
        self._pinned.result()
        if self._is_gpu:
            self._stream.wait_event(free)
        address, size, step = target.data_ptr(), len(target), _whole_rows(_PIECE_BYTES, piece)
        with (self._directory / piece.file).open("rb", buffering=0) as source:
            read = _columns if piece.stride_bytes else _bytes
            fill = read(source.fileno(), piece, start, size)
            for done in range(0, size, step):
                self._send(fill, done, address + done, min(step, size - done))

    def _send(self, fill: Callable[[memoryview, int], None], start: int, address: int, size: int) -> None:
        buffer = self._buffers.popleft()
        try:
            if self._is_gpu and not buffer.is_sent.query():
                buffer.is_sent.synchronize()
            fill(buffer.view[:size], start)
            if not self._is_gpu:
                ctypes.memmove(address, buffer.memory.data_ptr(), size)
                return
            if problem := _driver().cuMemcpyHtoDAsync_v2(
                address, buffer.memory.data_ptr(), size, self._stream.cuda_stream
            ):
                raise WeightsError(f"cuMemcpyHtoDAsync failed with {problem}")  # CUresult
            buffer.is_sent.record(self._stream)
        finally:
            self._buffers.append(buffer)

    def _buffer(self, memory: Tensor) -> _Buffer:
        return _Buffer(memory, memory.numpy().data, _cuda.Event() if self._is_gpu else None)

    def _begin_thread(self) -> None:
        if self._is_gpu:
            torch.cuda.set_device(self._stream.device)

    def _pin(self) -> None:
        """Pin the memory: 20 ms, beside other work."""
        if self._is_gpu:
            place = self._memory.data_ptr(), self._memory.nbytes
            _cuda.check_error(_cuda.cudart().cudaHostRegister(*place, 0))


def _whole_rows(most_bytes: int, piece: Piece) -> int:
    """Return at most that many bytes; of columns, those of whole rows.

    Raises:
        WeightsError: a row has more.
    """
    if not piece.stride_bytes:
        return most_bytes
    if piece.row_bytes > most_bytes:
        raise WeightsError(f"{piece.file}: a row of {piece.name} has {piece.row_bytes} bytes; the most is {most_bytes}")
    return most_bytes // piece.row_bytes * piece.row_bytes


def _bytes(file: int, piece: Piece, start: int, size: int) -> Callable[[memoryview, int], None]:
    """Return what reads bytes of a piece that follow each other, from a place behind ``start`` on."""

    def fill(view: memoryview, done: int) -> None:
        if os.preadv(file, [view], piece.offset + start + done) != len(view):
            raise _shortened(file)

    return fill


def _columns(file: int, piece: Piece, start: int, size: int) -> Callable[[memoryview, int], None]:
    """Return what copies ``size`` bytes of columns, from a place behind ``start`` on, out of the mapped file."""
    width, stride = piece.row_bytes, piece.stride_bytes
    begin = piece.offset + start // width * stride
    length = (size // width - 1) * stride + width
    os.posix_fadvise(file, begin, length, os.POSIX_FADV_WILLNEED)  # from a disk, ahead of the faults
    spare = begin % mmap.ALLOCATIONGRANULARITY
    try:
        memory = mmap.mmap(file, spare + length, mmap.MAP_SHARED, mmap.PROT_READ, offset=begin - spare)
    except ValueError:
        raise _shortened(file) from None
    rows = as_strided(np.frombuffer(memory, np.uint8, offset=spare), (size // width, width), (stride, 1))

    def fill(view: memoryview, done: int) -> None:
        target = np.frombuffer(view, np.uint8).reshape(-1, width)
        np.copyto(target, rows[done // width :][: len(target)])

    return fill


def _shortened(file: int) -> WeightsError:
    return WeightsError(f"{os.readlink(f'/proc/self/fd/{file}')}: has become shorter while it was read")


@lru_cache
def _driver() -> Any:
    """Return the driver's library, whose functions run with the GIL held."""
    driver = ctypes.PyDLL("libcuda.so.1")
    driver.cuMemcpyHtoDAsync_v2.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return driver
