"""The KV cache: what is kept while it grows, its budget, copies of beams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.fastertransformer.engine.attention.cache import UNBOUNDED, CacheShape, KvCache, free_bytes
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.loading import choose_budget
from backends.fastertransformer.engine.settings import Settings

CPU = torch.device("cpu")
SHAPE = CacheShape(layers=2, head_num=3, size_per_head=4, dtype=torch.float32)
TOKEN_BYTES = 2 * 2 * 3 * 4 * 4  # layers, k and v, heads, size, fp32


def filled(budget_bytes: int = 1 << 20, shape: CacheShape = SHAPE) -> KvCache:
    cache = KvCache(shape, CPU, budget_bytes)
    cache.reserve(2, 5, cross_capacity=3 if shape.has_cross else 0)
    for block in (*cache.memory, *cache.cross_memory):
        block.copy_(torch.randn_like(block))
    return cache


def test_rows_keep_what_they_cached_while_it_grows() -> None:
    cache = filled()
    before = [block[:, :2, :, :5].clone() for block in cache.memory]
    cache.windows[1] = 4
    cache.reserve(5, 70, kept=2)
    assert cache.slots >= 5 and cache.capacity >= 70
    assert cache.windows[: cache.slots].tolist() == [UNBOUNDED, 4] + [UNBOUNDED] * (cache.slots - 2)
    for block, old in zip(cache.memory, before, strict=True):
        assert block.shape == (2, cache.slots, 3, cache.capacity, 4)
        assert torch.equal(block[:, :2, :, :5], old)


def test_blocks_never_exceed_the_budget() -> None:
    cache = KvCache(SHAPE, CPU, 100 * TOKEN_BYTES)
    for slots, capacity in ((1, 1), (3, 33), (1, 100), (100, 1), (7, 14), (2, 50)):
        cache.reserve(slots, capacity)
        assert cache.slots >= slots and cache.capacity >= capacity
        assert sum(block.numel() * block.element_size() for block in cache.memory) <= 100 * TOKEN_BYTES
    assert cache.fits(4, 25) and not cache.fits(4, 26)
    with pytest.raises(
        EngineError, match=f"4 rows of 26 tokens need {104 * TOKEN_BYTES} bytes .* over {100 * TOKEN_BYTES}"
    ):
        cache.reserve(4, 26)


def test_copies_read_before_they_write_and_take_the_encoders_part_along() -> None:
    cache = filled(shape=CacheShape(2, 3, 4, torch.float32, has_cross=True))
    before = [block.clone() for block in cache.memory]
    cross = [block.clone() for block in cache.cross_memory]
    cache.copy([0, 1], [1, 0], 5)
    for block, old in zip(cache.memory, before, strict=True):
        assert torch.equal(block[:, :2, :, :5], old[:, [1, 0], :, :5])
    for block, old in zip(cache.cross_memory, cross, strict=True):
        assert torch.equal(block[:, :2], old[:, [1, 0]])


def test_what_is_saved_comes_back_in_another_slot() -> None:
    cache = filled()
    before = [block[:, 0, :, :4].clone() for block in cache.memory]
    saved = cache.save(0, 4)
    cache.restore(1, saved)
    for block, old in zip(cache.memory, before, strict=True):
        assert torch.equal(block[:, 1, :, :4], old)


def test_the_budget_leaves_a_gpu_something_to_work_on() -> None:
    gpu, gigabyte = torch.device("cuda", 0), 1 << 30
    usual = Settings(Path("1-gpu"), 1, 1, "fp16")
    assert choose_budget(usual, 100 * gigabyte, CPU) == 50 * gigabyte
    assert choose_budget(usual, 100 * gigabyte, gpu) == 90 * gigabyte
    assert choose_budget(usual, 5 * gigabyte, gpu) == 4 * gigabyte
    assert choose_budget(usual, gigabyte, gpu) == gigabyte // 2
    assert choose_budget(replace(usual, kv_cache_fraction=0.25), 100 * gigabyte, gpu) == 25 * gigabyte
    told = replace(usual, kv_cache_bytes=7 * gigabyte)
    assert choose_budget(told, 8 * gigabyte, gpu) == choose_budget(told, gigabyte, CPU) == 7 * gigabyte
    with pytest.raises(EngineError, match=f"kv_cache_bytes = {7 * gigabyte}: cuda:0 has {gigabyte} bytes left"):
        choose_budget(told, gigabyte, gpu)


def test_free_memory_is_what_the_kernel_says() -> None:
    assert 0 < free_bytes(CPU) < 1 << 50
