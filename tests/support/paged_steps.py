"""Steps whose cache has few pages, with numbers in them."""

from __future__ import annotations

from backends.fastertransformer.engine import loading
from backends.fastertransformer.engine.cache.kv_cache import PAGE, KvCache
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps
from support.asking import CPU


def paged_steps(settings: Settings, pages: int = 200) -> Steps:
    steps, _ = loading.load_steps(settings, CPU)
    shape = steps.cache.shape
    cache = KvCache(shape, CPU, (pages + 1) * PAGE * shape.token_bytes, steps.config.max_pos_seq_len)
    for block in cache.memory:
        block.fill_(1e4)  # what an earlier row left must not matter
    return Steps(steps.network, cache)
