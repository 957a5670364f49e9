"""How much memory there is for keys and values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backends.fastertransformer.engine.cache.sizing import free_bytes
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.part import choose_budget
from backends.fastertransformer.engine.settings import Settings

CPU = torch.device("cpu")


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
