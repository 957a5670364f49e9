"""CUDA graphs, faked: what would be captured is done instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.fastertransformer.engine.steps import graphs


class DoneAgain:
    """In place of CUDA graphs, by size."""

    def __init__(self, run: Callable[[int], Any], pool: object) -> None:
        self.run, self.sizes = run, list[int]()

    def capture(self, size: int) -> None:
        self.sizes.append(size)
        self.run(size)

    def replay(self, size: int) -> Any:
        return self.run(size)

    def size_of(self, count: int, has_room: Callable[[int], bool] = lambda _: True) -> int:
        return min((size for size in self.sizes if size >= count and has_room(size)), default=0)

    def release(self) -> None:
        self.sizes.clear()


def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on steps can be captured without a GPU."""
    monkeypatch.setattr(graphs, "Graphs", DoneAgain)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
