"""The cache: pages change hands, content does not move."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest
import torch

from backends.fastertransformer.engine.cache.kv_cache import PAGE, KvCache
from backends.fastertransformer.engine.cache.sizing import UNBOUNDED, CacheShape
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.model.positions import AttentionSpec
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.ops.torch_attention import PagedView

CPU = torch.device("cpu")
SHAPE = CacheShape(layers=2, head_num=3, size_per_head=4, dtype=torch.float32)
PAGE_BYTES = PAGE * 2 * 2 * 3 * 4 * 4  # tokens, layers, k and v, heads, size, fp32


def opened(pages: int = 12) -> KvCache:
    return KvCache(SHAPE, CPU, (pages + 1) * PAGE_BYTES + 5, longest=4 * PAGE)


def place(cache: KvCache, first: int, *needs: int, **more: object) -> None:
    count = len(needs)
    windows, sources = np.full(count, UNBOUNDED), np.zeros(count, np.int64)
    cache.allocate(first, np.array(needs), windows, sources, more.get("saved", {}))  # type: ignore[arg-type]


def fill(cache: KvCache, slot: int, count: int) -> torch.Tensor:
    """Write random entries, [layers, 2, H, count, D]."""
    content = torch.randn(2, 2, 3, count, 4)
    steps = torch.arange(count)
    for block, (k, v) in zip(cache.memory, content, strict=True):
        Ops(CPU).kv_write(block, cache.block_tables[slot, steps // PAGE], steps % PAGE, k, v)
    return content


def held(cache: KvCache, slot: int, count: int) -> torch.Tensor:
    pages = cache.block_tables[slot].long()
    return torch.stack([block[:, pages].transpose(1, 2).flatten(2, 3)[:, :, :count] for block in cache.memory])


def test_rows_keep_what_they_have_while_others_come_and_leave() -> None:
    cache = opened()
    place(cache, 0, 40, 10)
    place(cache, 2, 65)
    content = [fill(cache, slot, count) for slot, count in enumerate((40, 10, 65))]
    addresses = [block.data_ptr() for block in (*cache.memory, cache.block_tables, cache.windows)]
    cache.free(3, 2, np.array([0]), np.array([2]))  # the last moves in where the first was
    assert torch.equal(held(cache, 0, 65), content[2]) and torch.equal(held(cache, 1, 10), content[1])
    place(cache, 2, 64, 32, 33)
    more = fill(cache, 2, 64)
    assert torch.equal(held(cache, 0, 65), content[2]) and torch.equal(held(cache, 2, 64), more)
    assert addresses == [block.data_ptr() for block in (*cache.memory, cache.block_tables, cache.windows)]
    cache.free(5, 0, np.array([], int), np.array([], int))
    assert cache._pool._runs == [range(1, 13)] and not cache.block_tables.any() and (cache.windows == 1).all()


def test_the_budget_is_kept_page_by_page() -> None:
    cache = opened(pages=12)
    assert cache.budget_bytes == 12 * PAGE_BYTES
    assert sum(block.numel() * 4 for block in cache.memory) <= 13 * PAGE_BYTES + 5
    assert cache.bytes_of([(1, PAGE, 0), (4, PAGE + 1, 0)]) == 9 * PAGE_BYTES
    place(cache, 0, *[PAGE] * 11)
    with pytest.raises(EngineError, match="2 pages of the KV cache for 12 rows; there are 1"):
        place(cache, 11, PAGE + 1)


def test_copies_read_before_they_write() -> None:
    cache = opened()
    place(cache, 0, 50, 50)
    content = [fill(cache, slot, 50) for slot in range(2)]
    cache.copy(np.array([0, 1]), np.array([1, 0]), 50)
    assert torch.equal(held(cache, 0, 50), content[1]) and torch.equal(held(cache, 1, 50), content[0])


def test_what_is_saved_comes_back_in_another_slot_and_counts_while_it_is_away() -> None:
    cache = opened()
    place(cache, 0, 40, 90)
    content = fill(cache, 1, 80)
    saved = cache.save(1, 70)
    cache.free(2, 0, np.array([], int), np.array([], int))
    assert len(cache._pool) == 12 - 3 and cache.bytes_of([(1, 70, 0)]) == 3 * PAGE_BYTES
    place(cache, 0, 5)
    fill(cache, 0, 5)
    place(cache, 1, 100, saved={1: saved})
    assert torch.equal(held(cache, 1, 70), content[..., :70, :]) and len(cache._pool) == 12 - 5
    cache.free_saved(cache.save(1, 64))
    cache.free(2, 0, np.array([], int), np.array([], int))
    assert cache._pool._runs == [range(1, 13)]


def test_given_entries_are_put_in_front_and_a_wiped_slot_is_as_a_new_one() -> None:
    cache = opened()
    place(cache, 0, 70, 70)
    given = [torch.randn(2, 3, 37, 4) for _ in range(2)]
    before = held(cache, 0, 70)
    cache.restore(1, given)
    cache.restore(0, [torch.empty(2, 3, 0, 4) for _ in range(2)])
    assert torch.equal(held(cache, 1, 37), torch.stack(given)) and torch.equal(held(cache, 0, 70), before)
    for block in cache.memory:
        block.fill_(float("nan"))
    cache.clear(np.array([1]))
    assert not held(cache, 1, 70).any() and held(cache, 0, 70).isnan().all()


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("needs", [(40, 40, 40), (40, 70, 12), (1, 128, 33)], ids=str)
@pytest.mark.parametrize("is_torn", [False, True])
def test_rows_are_read_wherever_their_pages_are(needs: tuple[int, ...], is_torn: bool, has_mask: bool) -> None:
    """Against softmax(q k) v of what was written."""
    cache = opened(pages=14)
    if is_torn:  # no page that is free has a neighbour
        cache._pool.allocate(14)
        cache._pool.free(range(1, 15, 2))
    place(cache, 0, *needs)
    content = [fill(cache, slot, count) for slot, count in enumerate(needs)]
    q, mask = torch.randn(3, 3, 1, 4), torch.randn(3, 3, 1, max(needs)) if has_mask else None
    rows = PagedView(cache.block_tables[:3], torch.tensor(needs))
    assert (rows._even is not None) == (len(set(needs)) == 1 and not is_torn)
    for layer, block in enumerate(cache.memory):
        found = rows.attend(q, block, mask, AttentionSpec(0.3))
        for row, count in enumerate(needs):
            k, v = content[row][layer]
            scores = q[row] @ k.transpose(1, 2) * 0.3 + (0 if mask is None else mask[row, ..., :count])
            assert (found[row] - scores.softmax(-1) @ v).abs().max() < 1e-5


def test_a_process_with_more_cache_than_memory_may_still_be_forked() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shape = CacheShape(layers=2, head_num=8, size_per_head=128, dtype=torch.float32)
    cache = KvCache(shape, CPU, int(1.5 * memory), longest=64)
    assert cache.budget_bytes > memory
    child = multiprocessing.get_context("fork").Process(target=os.getpid)
    child.start()
    child.join()
    assert child.exitcode == 0
