"""An engine on the CPU with the cache that a GPU has."""

from __future__ import annotations

import pytest
from asking import CPU

from backends.fastertransformer.engine import loading
from backends.fastertransformer.engine.attention.cache import CacheShape
from backends.fastertransformer.engine.attention.pages import PagedCache
from backends.fastertransformer.engine.network.steps import Steps
from backends.fastertransformer.engine.settings import Settings


def have_pages(patch: pytest.MonkeyPatch) -> None:
    """Open every engine with pages."""
    patch.setattr(loading, "can_run_on", lambda _: True)


def paged_steps(settings: Settings, pages: int = 200) -> Steps:
    steps, _ = loading.load_steps(settings, CPU)
    shape: CacheShape = steps.cache.shape
    budget_bytes = shape.bytes_for(pages + 1, 32)
    cache = PagedCache(shape, CPU, budget_bytes, steps.config.max_pos_seq_len)
    for block in cache.memory:
        block.fill_(1e4)  # what an earlier row left must not matter
    return Steps(steps.network, cache)
