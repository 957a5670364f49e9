"""A CPU that the engine takes for a GPU. CUDA graphs are faked: what would be captured is done instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backends.fastertransformer.engine.cache import kv_cache as pages
from backends.fastertransformer.engine.model import attention, layers, network
from backends.fastertransformer.engine.steps import graphs, warmup


class DoneAgain:
    """In place of CUDA graphs, by size."""

    def __init__(self, take: Callable[[int], Any], pool: object) -> None:
        self.take, self.sizes = take, list[int]()

    def capture(self, size: int) -> None:
        self.sizes.append(size)
        self.take(size)

    def run(self, size: int) -> Any:
        return self.take(size)

    def size_of(self, count: int, has_room: Callable[[int], bool] = lambda _: True) -> int:
        return min((size for size in self.sizes if size >= count and has_room(size)), default=0)


def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on kernels are launched; but those of products, which ask the tensors themselves."""
    for module in (attention, pages, network, layers, warmup):
        monkeypatch.setattr(module, "can_run_on", lambda _: True)
    monkeypatch.setattr(graphs, "Graphs", DoneAgain)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
