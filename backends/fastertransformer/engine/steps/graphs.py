"""CUDA graphs: one launch in place of some hundreds, for each of a few numbers of rows of a decode step, or of tokens.

What is captured reads everything that differs from one time to the next (ids, positions, windows, pages) from the
device's memory, at addresses that never change, so once, when the model is loaded, is enough. A step of fewer rows than
were captured takes some that nobody has along: they write to the page of nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..cache.kv_cache import KvCache
from ..cache.sizing import MOST_SLOTS, upload
from ..model.network import Network
from ..model.packed_rows import NumberedRows, Rows

Chosen = tuple[Tensor, Tensor]  # logits, fp32 [N, V], and the argmax tokens, see sampling.argmax
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
# Few enough to be captured in seconds, so near to each other that beyond 64 tokens padding is less than a quarter.
TOKENS = (*range(16, 128, 16), *range(128, 256, 32), *range(256, 1024, 64), *range(1024, 2049, 128))
T = TypeVar("T")


def most_rows(tokens: int) -> int:
    """Say of how many rows contexts of so many tokens may be that are captured together.

    Each of them costs a block of queries that may be empty (see PackedRows.cut): an eighth of the tokens leaves these
    few beside the tokens' own.
    """
    return max(16, min(64, tokens // 8))


class Graphs(Generic[T]):
    """What was captured, by size.

    Args:
        take: does the work of a size; what it returns is the same memory each time that the graph runs.
        pool: memory that several share, so that none's result outlives the next one's run.
    """

    def __init__(self, take: Callable[[int], T], pool: Any) -> None:
        self._take, self._pool = take, pool
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, T]] = {}

    def capture(self, size: int) -> None:
        """Do the work of a size, so that all it needs is compiled, and capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._take(size)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            result = self._take(size)
        self._graphs[size] = graph, result

    def run(self, size: int) -> T:
        """Do the work of a size that was captured."""
        graph, result = self._graphs[size]
        graph.replay()
        return result

    def size_of(self, count: int, has_room: Callable[[int], bool] = lambda _: True) -> int:
        """Give the least size that was captured, has room for so much and meets a condition; 0: none does."""
        return min((size for size in self._graphs if size >= count and has_room(size)), default=0)


class StepGraphs:
    """The steps of a process that were captured.

    Args:
        network: of the process.
        cache: its.
        decode: runs one token of each of so many rows.

    Attributes:
        largest_input: tokens of the largest context that was captured; 0: none was.
        largest_step: rows of the largest decode step that was captured; 0: none was.
    """

    def __init__(self, network: Network, cache: KvCache, decode: Callable[[int], Chosen]) -> None:
        self._network, self._cache = network, cache
        pool = torch.cuda.graph_pool_handle()
        self._decode, self._begin = Graphs(decode, pool), Graphs(self._run_contexts, pool)
        self._device = cache.block_tables.device
        # Id, position and slot of each token; MOST_SLOTS is nobody's.
        self._nobody = np.array([[0], [0], [MOST_SLOTS]])
        self._tokens = upload(np.repeat(self._nobody, TOKENS[-1], 1), self._device)
        self._ends = torch.zeros(most_rows(TOKENS[-1]) + 2, dtype=torch.int32, device=self._device)
        self.largest_input, self.largest_step = 0, 0

    def capture(self, rows: int, tokens: int) -> None:
        """Capture a decode step of so many rows, or contexts of so many tokens."""
        (self._decode if rows else self._begin).capture(rows or tokens)
        self.largest_step, self.largest_input = max(self.largest_step, rows), max(self.largest_input, tokens)

    def decode(self, count: int) -> Chosen | None:
        """Take a decode step; None: no graph is large enough."""
        if not (size := self._decode.size_of(count)):
            return None
        logits, tokens = self._decode.run(size)
        return logits[:count], tokens[:count]

    def begin(self, rows: NumberedRows) -> Tensor | None:
        """Run contexts, or what encoders are given; None: no graph has room for them. See Steps.extend."""
        count, row_count = rows.tokens.shape[1], len(rows.lengths)
        if not (size := self._begin.size_of(count, lambda size: most_rows(size) >= row_count)):
            return None
        padded = np.concatenate((rows.tokens, np.repeat(self._nobody, size - count, 1)), 1)
        self._tokens[:, :size] = upload(padded, self._device)
        # What is behind the rows is a row of its own, and behind it there are rows without tokens.
        ends = np.concatenate((rows.ends, np.full(len(self._ends) - len(rows.ends), size)))
        self._ends.copy_(upload(ends.astype(np.int32), self._device))
        return self._begin.run(size)[:count]

    def _run_contexts(self, size: int) -> Tensor:
        take = self._network.encode if self._cache.shape.has_cross else self._network.extend
        ids, positions, slots = self._tokens[:, :size]
        return take(Rows(ids, positions, slots, self._ends[: most_rows(size) + 2], None), self._cache)
