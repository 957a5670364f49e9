"""CUDA graphs of decode steps: one launch in place of some hundreds, for each of a few numbers of rows.

A step reads everything that differs from one to the next (ids, positions, windows, pages) from the device's memory, at
addresses that never change, so what was captured once when the model was loaded serves every step. A step of fewer rows
than were captured takes some that nobody has along: they write to the page of nobody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

Chosen = tuple[Tensor, Tensor]  # logits, fp32 [N, V], and the likeliest tokens, see sampling.likeliest
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # rows


class Graphs:
    """What was captured, by number of rows.

    Args:
        take: runs a step of so many rows; what it returns stays the same memory in a graph.
        device: of all of it.
    """

    def __init__(self, take: Callable[[int], Chosen], device: torch.device) -> None:
        self._take = take
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Chosen]] = {}

    def capture(self, size: int) -> None:
        """Run a step of so many rows, so that all it needs is compiled, and capture another."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._take(size)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            result = self._take(size)
        self._graphs[size] = graph, result

    def run(self, count: int) -> Chosen | None:
        """Take a step of so many rows; give its result for them, or None: no graph is large enough."""
        sizes = sorted(self._graphs)
        place = bisect_left(sizes, count)
        if place == len(sizes):
            return None
        graph, result = self._graphs[sizes[place]]
        graph.replay()
        return result[0][:count], result[1][:count]
