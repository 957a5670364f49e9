"""Files to a GPU at the rate of its link: read ahead by several threads into pinned memory, copied from there.

A shard that is mapped and copied comes over page by page, by one thread, through a buffer of the driver's: a fraction
of what the link carries. Here threads read pieces of the files, in the order in which they will be asked for, and each
piece is on its way to the GPU while the next ones are read.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .errors import WeightsError
from .shards import Shards, check_file

AHEAD_BYTES = 1 << 30  # of what is read ahead; a larger file is read by itself
_PIECE_BYTES = 16 << 20
_THREADS = max(4, min(16, len(os.sched_getaffinity(0))))
_BUFFERS = 3 * _THREADS // 2  # some are being filled, others emptied


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
        self._pool = ThreadPoolExecutor(_THREADS, "shards")
        self._buffers: queue.SimpleQueue[tuple[Tensor | None, Any]] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._buffers.put((None, None))  # they are made while others are in use: pinning memory takes its time

    def __enter__(self) -> Shards:
        """Give the source."""
        return self._give

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the threads; pieces that are on their way arrive."""
        self._pool.shutdown(cancel_futures=True)
        if self._is_gpu:
            self._stream.synchronize()

    def _give(self, file: str, shape: tuple[int, ...]) -> Tensor:
        while self._coming and (not self._read or self._ahead_bytes < AHEAD_BYTES):
            self._begin(*self._coming.popleft())
        name, content, pieces = self._read.popleft()
        assert name == file, f"{file} was asked for, {name} was to come"
        for piece in pieces:
            piece.result()
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
        starts = range(0, size, _PIECE_BYTES)
        pieces = [
            self._pool.submit(self._bring, path, start, content[start : start + _PIECE_BYTES], free) for start in starts
        ]
        self._read.append((file, content, pieces))
        self._ahead_bytes += size

    def _bring(self, path: Path, start: int, target: Tensor, free: Any) -> None:
        """Read a piece, and send it on its way."""
        buffer, is_sent = self._buffers.get()
        try:
            # What is loaded in this mode may be written to in no other, and mode and stream are each thread's own.
            with torch.inference_mode(), torch.cuda.stream(self._stream) if self._is_gpu else nullcontext():
                if buffer is None:
                    buffer = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=self._is_gpu)
                if is_sent is not None:
                    is_sent.synchronize()
                piece = buffer[: len(target)]
                with path.open("rb", buffering=0) as source:
                    found = os.preadv(source.fileno(), [piece.numpy().data], start)
                if found != len(target):
                    raise WeightsError(f"{path}: has become shorter while it was read")
                if self._is_gpu:
                    self._stream.wait_event(free)
                target.copy_(piece, non_blocking=True)
                is_sent = self._stream.record_event() if self._is_gpu else None
        finally:
            self._buffers.put((buffer, is_sent))
