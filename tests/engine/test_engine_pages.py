"""The cache: pages change hands, content does not move."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest
import torch

from backends.fastertransformer.engine.cache.kv_cache import PAGE, KvCache
from backends.fastertransformer.engine.cache.page_pool import RowPages
from backends.fastertransformer.engine.cache.sizing import CacheShape, Entry
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.ops.cached_attention import PagedView
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.ops.positions import AttentionSpec

CPU = torch.device("cpu")
SHAPE = CacheShape((Entry(3, 4),) * 2, torch.float32)
PAGE_BYTES = PAGE * 2 * 2 * 3 * 4 * 4  # tokens, layers, k and v, heads, size, fp32


def opened(pages: int = 12) -> KvCache:
    return KvCache(SHAPE, CPU, (pages + 1) * PAGE_BYTES + 5, longest=4 * PAGE)


def place(cache: KvCache, first: int, *needs: int) -> list[RowPages]:
    rows = [cache.allocator.take(need) for need in needs]
    cache.allocate(first, rows)
    return rows


def fill(cache: KvCache, slot: int, count: int) -> torch.Tensor:
    """Write random entries, [layers, 2, H, count, D]."""
    content = torch.randn(2, 2, 3, count, 4)
    steps = torch.arange(count)
    for block, (k, v) in zip(cache.kv, content, strict=True):
        Ops(CPU).kv_write(block, cache.page_tables[slot, steps // PAGE], steps % PAGE, k, v)
    return content


def held(cache: KvCache, slot: int, count: int) -> torch.Tensor:
    pages = cache.page_tables[slot].long()
    return torch.stack([block[:, pages].transpose(1, 2).flatten(2, 3)[:, :, :count] for block in cache.kv])


def free(cache: KvCache, count: int, kept: int, moved: dict[int, int], rows: list[RowPages]) -> None:
    cache.free(count, kept, np.array([*moved], int), np.array([*moved.values()], int))
    cache.allocator.release(rows)


def test_rows_keep_what_they_have_while_others_come_and_leave() -> None:
    cache = opened()
    rows = [*place(cache, 0, 40, 10), *place(cache, 2, 65)]
    content = [fill(cache, slot, count) for slot, count in enumerate((40, 10, 65))]
    addresses = [block.data_ptr() for block in (*cache.kv, cache.page_tables, cache.windows)]
    free(cache, 3, 2, {0: 2}, [rows.pop(0)])  # the last moves in where the first was
    assert torch.equal(held(cache, 0, 65), content[2]) and torch.equal(held(cache, 1, 10), content[1])
    rows += place(cache, 2, 64, 32, 33)
    more = fill(cache, 2, 64)
    assert torch.equal(held(cache, 0, 65), content[2]) and torch.equal(held(cache, 2, 64), more)
    assert addresses == [block.data_ptr() for block in (*cache.kv, cache.page_tables, cache.windows)]
    free(cache, 5, 0, {}, rows)
    assert cache.allocator._pool._runs == [range(1, 13)] and not cache.page_tables.any() and (cache.windows == 1).all()


def test_the_budget_is_kept_page_by_page() -> None:
    cache = opened(pages=12)
    assert cache.budget_bytes == 12 * PAGE_BYTES
    assert sum(block.numel() * 4 for block in cache.kv) <= 13 * PAGE_BYTES + 5
    assert cache.bytes_of([(1, PAGE, 0), (4, PAGE + 1, 0)]) == 9 * PAGE_BYTES
    place(cache, 0, *[PAGE] * 11)
    with pytest.raises(EngineError, match="2 pages of the KV cache for a row; there are 1"):
        place(cache, 11, PAGE + 1)
    assert cache.allocator.free == 1


def test_copies_read_before_they_write() -> None:
    cache = opened()
    rows = place(cache, 0, 50, 50)
    content = [fill(cache, slot, 50) for slot in range(2)]
    pages = [row.pages for row in rows]
    cache.copy(np.array([sum(pages, []), sum(pages[::-1], [])]), np.array([[0, 1], [1, 0]]))
    assert torch.equal(held(cache, 0, 50), content[1]) and torch.equal(held(cache, 1, 50), content[0])


def test_what_is_saved_comes_back_in_another_slot_and_counts_while_it_is_away() -> None:
    cache = opened()
    rows = place(cache, 0, 40, 90)
    content = fill(cache, 1, 80)
    saved = cache.allocator.save(rows[1], 70)
    free(cache, 2, 0, {}, rows)
    assert cache.allocator.free == 12 - 3 and cache.bytes_of([(1, 70, 0)]) == 3 * PAGE_BYTES
    place(cache, 0, 5)
    fill(cache, 0, 5)
    back = cache.allocator.take(100, saved=saved)
    cache.allocate(1, [back])
    assert torch.equal(held(cache, 1, 70), content[..., :70, :]) and cache.allocator.free == 12 - 5
    cache.allocator.free_saved(cache.allocator.save(back, 64))
    assert cache.allocator.free == 12 - 3


def test_given_entries_are_put_in_front_and_a_wiped_row_is_as_a_new_one() -> None:
    cache = opened()
    rows = place(cache, 0, 70, 70)
    given = [torch.randn(2, 3, 37, 4) for _ in range(2)]
    before = held(cache, 0, 70)
    cache.restore(np.array(rows[1].pages), given)
    cache.restore(np.array(rows[0].pages), [torch.empty(2, 3, 0, 4) for _ in range(2)])
    assert torch.equal(held(cache, 1, 37), torch.stack(given)) and torch.equal(held(cache, 0, 70), before)
    for block in cache.kv:
        block.fill_(float("nan"))
    cache.clear(np.array(rows[1].pages))
    assert not held(cache, 1, 70).any() and held(cache, 0, 70).isnan().all()


def test_a_row_that_grows_stays_contiguous_while_there_is_room_and_takes_any_page_then() -> None:
    """What is held for one row's growth is taken by another that needs it, and no table lists it any longer."""
    cache = opened(pages=8)
    allocator = cache.allocator
    rows = [allocator.take(10, most=4 * PAGE), allocator.take(40, most=4 * PAGE)]
    assert [row.pages for row in rows] == [[1], [5, 6]] and allocator.free == 8 - 3
    for slot, row in enumerate(rows):
        row.slot = slot
    cache.allocate(0, rows)
    assert allocator.grow(rows[0], PAGE + 1) and rows[0].pages == [1, 2]
    assert allocator.take_changes() is None and cache.page_tables[:2].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    third = allocator.take(3 * PAGE)  # nothing is free but what is held
    assert allocator.free == 1 and len({*rows[0].pages, *rows[1].pages, *third.pages}) == 7
    assert allocator.grow(rows[1], 4 * PAGE) is False and allocator.free == 1  # it needs two
    assert allocator.grow(rows[1], 3 * PAGE) and allocator.free == 0 and not allocator.grow(rows[0], 3 * PAGE)
    changes = allocator.take_changes()
    assert changes is not None
    cache.update(changes)
    for row in rows:
        table = cache.page_tables[row.slot].tolist()
        assert table == row.pages + [0] * (4 - len(row.pages))
    allocator.release([*rows, third])
    assert allocator.free == 8 and allocator._pool._runs == [range(1, 9)]


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize(
    ("needs", "calls"), [((40, 40, 40), 1), ((70, 40, 40), 2), ((40, 70, 12), 3), ((1, 128, 33), 3)], ids=str
)
@pytest.mark.parametrize("is_torn", [False, True])
def test_rows_are_read_wherever_their_pages_are(
    needs: tuple[int, ...], calls: int, is_torn: bool, has_mask: bool
) -> None:
    """Against softmax(q k) v of what was written; neighbours of one length are computed in one call."""
    cache = opened(pages=14)
    if is_torn:  # no page that is free has a neighbour
        cache.allocator._pool.take(14)
        cache.allocator._pool.free(range(1, 15, 2))
    place(cache, 0, *needs)
    content = [fill(cache, slot, count) for slot, count in enumerate(needs)]
    q, mask = torch.randn(3, 3, 1, 4), torch.randn(3, 3, 1, max(needs)) if has_mask else None
    rows = PagedView(cache.page_tables[:3], torch.tensor(needs))
    assert len(rows._parts) == (3 if is_torn else calls)
    for layer, block in enumerate(cache.kv):
        found = rows.attend(q, block, mask, AttentionSpec(0.3))
        for row, count in enumerate(needs):
            k, v = content[row][layer]
            scores = q[row] @ k.transpose(1, 2) * 0.3 + (0 if mask is None else mask[row, ..., :count])
            assert (found[row] - scores.softmax(-1) @ v).abs().max() < 1e-5


def test_a_process_with_more_cache_than_memory_may_still_be_forked() -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shape = CacheShape((Entry(8, 128),) * 2, torch.float32)
    cache = KvCache(shape, CPU, int(1.5 * memory), longest=64)
    assert cache.budget_bytes > memory
    child = multiprocessing.get_context("fork").Process(target=os.getpid)
    child.start()
    child.join()
    assert child.exitcode == 0
