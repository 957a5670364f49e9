"""Steps whose cache has few pages, with numbers in them."""

from __future__ import annotations

from backends.fastertransformer.engine import loading
from backends.fastertransformer.engine.cache.kv_cache import PAGE, KvCache
from backends.fastertransformer.engine.cache.states import States
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps
from support.engines.asking import CPU


def paged_steps(settings: Settings, pages: int = 200) -> Steps:
    steps, _ = loading.load_steps(settings, CPU)
    shape = steps.cache.shape
    size = (pages + 1) * PAGE * shape.token_bytes
    states = poisoned_states(steps.network, steps.cache.states.count) if steps.cache.states else None
    reach = steps.cache.allocator.window
    cache = KvCache(shape, CPU, size, steps.config.max_pos_seq_len, reach=reach, states=states)
    for block in (*cache.kv, *cache.beside, *cache.outputs):
        block.fill_(1e4)  # what an earlier row left must not matter
        block[:, 0] = float("nan")  # and this page is never read
    drafting = Steps(steps.drafting.network, cache.of_draft_model()) if steps.drafting else None
    return Steps(steps.network, cache, adapters=steps.adapters, drafting=drafting)


def poisoned_states(network: Network, count: int) -> States:
    """Allocate states full of what must never be read: each row begins with zeros."""
    assert network.weights.decoder
    states = States(network.weights.decoder.states, count, CPU)
    for part in (part for layer in states.layers if layer for part in layer):
        part.fill_(float("nan"))
    return states
