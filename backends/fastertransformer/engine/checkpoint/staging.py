"""Files to a GPU at the rate of its link: read ahead by several threads into pinned memory, copied from there.

A shard that is mapped and copied comes over page by page, by one thread, through a buffer of the driver's: a fraction
of what the link carries. Here threads read parts of the files, in the order in which they will be asked for, and each
piece of a part is on its way to the GPU while the next one is read. All pieces together stay in the processor's cache,
from which the GPU fetches them; smaller ones would take less of it, but the threads of Python wait for each other
before and behind every call.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..errors import WeightsError
from .shards import Shards, check_file

AHEAD_BYTES = 1 << 30  # of what is read ahead; a larger file is read by itself
_PART_BYTES = 32 << 20  # what a thread reads of a file at a time
_PIECE_BYTES = 6 << 20
_THREADS = max(4, min(12, len(os.sched_getaffinity(0))))  # with 16 a load took longer
_BUFFERS = _THREADS + 4  # one for each thread; the others are being fetched


@dataclass
class _Buffer:
    """Memory for a piece, from which a GPU fetches by itself.

    Attributes:
        memory: [_PIECE_BYTES].
        view: of it, to read a file into.
        is_sent: happens when it may be written to again; None: there is no GPU.
    """

    memory: Tensor
    view: memoryview
    is_sent: Any


class StagedFiles:
    """Gives the shards of a checkpoint on a device, in a given order; a context manager.

    Args:
        directory: of the files.
        order: file and shape of each shard, as they will be asked for.
        dtype: of the numbers in the files.
        device: where they go.
    """

    def __init__(
        self, directory: Path, order: Sequence[tuple[str, tuple[int, ...]]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._directory, self._dtype, self._device = directory, dtype, device
        self._coming = deque(order)
        self._read: deque[tuple[str, Tensor, list[Future[None]]]] = deque()
        self._ahead_bytes = 0
        self._is_gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._is_gpu else None  # type: ignore[no-untyped-call]
        self._driver: Any = torch.cuda.cudart() if self._is_gpu else None  # type: ignore[no-untyped-call]
        self._memory = _huge_pages(_BUFFERS * _PIECE_BYTES)
        self._buffers = deque(map(self._buffer, self._memory.split(_PIECE_BYTES)))  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(_THREADS, "shards")

    def __enter__(self) -> Shards:
        """Give the source."""
        if self._is_gpu:
            place = self._memory.data_ptr(), self._memory.nbytes
            torch.cuda.check_error(self._driver.cudaHostRegister(*place, 0))
        return self._give

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads; pieces that are on their way arrive."""
        self._pool.shutdown(cancel_futures=True)
        if self._is_gpu:
            self._stream.synchronize()
            torch.cuda.check_error(self._driver.cudaHostUnregister(self._memory.data_ptr()))

    def _give(self, file: str, shape: tuple[int, ...]) -> Tensor:
        while self._coming and (not self._read or self._ahead_bytes < AHEAD_BYTES):
            self._begin(*self._coming.popleft())
        name, content, parts = self._read.popleft()
        assert name == file, f"{file} was asked for, {name} was to come"
        for part in parts:
            part.result()
        self._ahead_bytes -= content.nbytes
        if self._is_gpu:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return content.view(self._dtype).view(shape)

    def _begin(self, file: str, shape: tuple[int, ...]) -> None:
        """Have a file read."""
        path, size = self._directory / file, torch.Size(shape).numel() * self._dtype.itemsize
        check_file(path, shape, self._dtype)
        content = torch.empty(size, dtype=torch.uint8, device=self._device)
        free = None
        if self._is_gpu:  # the memory may be that of a tensor which is still being used
            free = torch.cuda.current_stream(self._device).record_event()
        starts = range(0, size, _PART_BYTES)
        parts = [
            self._pool.submit(self._bring, path, start, content[start : start + _PART_BYTES], free) for start in starts
        ]
        self._read.append((file, content, parts))
        self._ahead_bytes += size

    def _bring(self, path: Path, start: int, target: Tensor, free: Any) -> None:
        """Read a part, and send it on its way."""
        # What is loaded in this mode may be written to in no other, and mode and stream are each thread's own.
        with torch.inference_mode(), torch.cuda.stream(self._stream) if self._is_gpu else nullcontext():
            if self._is_gpu:
                self._stream.wait_event(free)
            with path.open("rb", buffering=0) as source:
                for piece in target.split(_PIECE_BYTES):  # type: ignore[no-untyped-call]
                    self._send(source.fileno(), start, piece)
                    start += len(piece)

    def _send(self, file: int, start: int, target: Tensor) -> None:
        buffer, size = self._buffers.popleft(), len(target)
        try:
            if self._is_gpu:
                buffer.is_sent.synchronize()
            if os.preadv(file, [buffer.view[:size]], start) != size:
                raise WeightsError(f"{os.readlink(f'/proc/self/fd/{file}')}: has become shorter while it was read")
            target.copy_(buffer.memory[:size], non_blocking=True)
            if self._is_gpu:
                buffer.is_sent.record(self._stream)
        finally:
            self._buffers.append(buffer)

    def _buffer(self, memory: Tensor) -> _Buffer:
        event = torch.cuda.Event() if self._is_gpu else None  # type: ignore[no-untyped-call]
        return _Buffer(memory, memory.numpy().data, event)


def _huge_pages(size_bytes: int) -> Tensor:
    """Give memory in pages of 2 MB, where the kernel has them: pinning those takes a fraction of the time."""
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
