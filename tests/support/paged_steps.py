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
    size = (pages + 1) * PAGE * shape.token_bytes
    cache = KvCache(shape, CPU, size, steps.config.max_pos_seq_len, reach=steps.config.reach)
    for block in cache.kv:
        block.fill_(1e4)  # what an earlier row left must not matter
        block[:, 0] = float("nan")  # and this page is never read
    return Steps(steps.network, cache)
