"""What loading asks of a GPU, what it says when there is too little, and what closing leaves behind."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.shards.gpt2_checkpoint import random_gpt2, write_shards
from test_engine import answer, ask  # type: ignore[import-not-found]

from backends.fastertransformer.engine import loading
from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.settings import Settings, read_settings

CPU = torch.device("cpu")
_WORKSPACES = (
    300_000_000  # bytes of a GPU that cuBLAS keeps for the process; a cache takes nine tenths of all there are
)
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(write_shards(random_gpt2(), tmp_path), 1, 1, "fp32", cpu_threads=1)


@pytest.mark.usefixtures("unfreezing")
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_closing_an_engine_frees_its_weights_and_its_cache(settings: Settings, device: str) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    engine = open_engine(settings, torch.device(device))
    answer(engine, ask([[1, 2, 3]], 4))
    cache = engine._steps.cache
    held = [*cache.kv, cache.page_tables, engine._steps.network.weights.token_embedding, engine._steps.slots.ids]
    watched = [weakref.ref(each) for each in (cache, engine._steps, engine._steps.network, *held)]
    del cache, held
    engine.close()
    assert [each() for each in watched if each() is not None] == []
    if device == "cuda":
        assert torch.cuda.memory_allocated() - before < _WORKSPACES
    with pytest.raises(EngineError, match="the engine was closed"):
        engine.submit(engine.parse(ask([[1]], 1)), print)
    engine.close()  # again: nothing happens


def test_a_gpu_without_a_compiler_is_refused_unless_its_user_goes_on(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Which compiler error there is, is what a real GPU says; here only what becomes of it."""
    monkeypatch.setattr(loading, "problem_on", lambda _: "Failed to find C compiler. Please specify via CC")
    with pytest.raises(EngineError) as refused:
        open_engine(settings, CPU)
    words = str(refused.value)
    assert "Failed to find C compiler" in words and "apt-get install gcc" in words and "torch_kernels = 1" in words
    open_engine(replace(settings, allows_torch_kernels=True), CPU).close()
    assert [record.levelno for record in caplog.records if "Failed to find C compiler" in record.getMessage()] == [
        logging.ERROR
    ]


def test_going_on_without_the_kernels_is_a_parameter_or_a_variable(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"data_type": "fp16", "model_checkpoint_path": str(settings.checkpoint)}
    assert not read_settings(given, tmp_path, "1").allows_torch_kernels
    assert read_settings({**given, "torch_kernels": "1"}, tmp_path, "1").allows_torch_kernels
    monkeypatch.setenv("SLIPWAY_TORCH_KERNELS", "1")
    assert read_settings(given, tmp_path, "1").allows_torch_kernels
    assert not read_settings({**given, "torch_kernels": "0"}, tmp_path, "1").allows_torch_kernels
    monkeypatch.setenv("SLIPWAY_TORCH_KERNELS", "maybe")
    with pytest.raises(EngineError, match="SLIPWAY_TORCH_KERNELS = maybe"):
        read_settings(given, tmp_path, "1")


def test_what_does_not_fit_into_a_gpu_is_one_error(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(_: object, mixed: int) -> str:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")

    monkeypatch.setattr(loading, "warm_up", warm_up)
    with pytest.raises(
        EngineError, match=r"does not fit into the memory of cpu: CUDA out of memory.*kv_cache_fraction"
    ):
        open_engine(settings, CPU)
