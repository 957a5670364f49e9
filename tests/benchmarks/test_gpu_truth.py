"""benchmarks.gpu.truth on a CPU: what is right is found right, and a planted fault is found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from backends.fastertransformer.engine.cache.fp8_entries import pack
from backends.fastertransformer.engine.model.hub_reader import HubReader
from backends.fastertransformer.engine.ops import cached_attention, fp8
from backends.fastertransformer.engine.request import adapters
from benchmarks.gpu import truth_models
from benchmarks.gpu.truth_answers import Row, check_answer
from benchmarks.gpu.truth_errors import compare_format
from benchmarks.gpu.truth_formats import ARRAYS, AT_LOAD, CACHE, STATIC
from benchmarks.gpu.truth_fp32 import compare_fp32
from benchmarks.gpu.truth_requests import KINDS, Told, draw_requests
from benchmarks.gpu.truth_served import TINY, TruthArguments, made
from benchmarks.gpu.truth_ways import ADAPTERS, CHANGED, DRAFT_MODEL, DRAFTS, EAGLE, MTP
from models import fused_experts

SHAPE = TINY
ARGUMENTS = TruthArguments(device="cpu", requests=len(KINDS))
_PREDICTING = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "qwen3_5", "qwen3_next", "nemotron3")


def _in(way: str) -> TruthArguments:
    return replace(ARGUMENTS, ways=(way,))


def test_what_is_served_is_what_transformers_gives_until_a_weight_is_another(tmp_path: Path) -> None:
    model, shards = made("mistral", SHAPE, tmp_path, 1)
    right = next(compare_fp32(ARGUMENTS, "mistral", model, SHAPE, shards))
    assert right.is_right and right.requests == 2 * len(KINDS) and right.tokens > 100 and right.error < 1e-3
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, 3] += 0.5
    wrong = next(compare_fp32(ARGUMENTS, "mistral", model, SHAPE, shards))
    assert not wrong.is_right and wrong.wrong > 0 and wrong.error > 0.05
    assert "**WRONG**" in wrong.cells() and "**WRONG**" not in right.cells()


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama_eagle3", EAGLE),
        *(pytest.param(name, DRAFT_MODEL, marks=pytest.mark.long) for name in ("qwen3", "deepseek_v3")),
        *(pytest.param(f"{name}_mtp", MTP, marks=pytest.mark.long) for name in _PREDICTING),
        pytest.param("qwen3_moe_eagle3", EAGLE, marks=pytest.mark.long),
    ],
)
def test_a_model_that_drafts_for_itself_is_right(name: str, way: str, tmp_path: Path) -> None:
    model, shards = made(name, SHAPE, tmp_path, 1)
    (row,) = compare_fp32(_in(way), name, model, SHAPE, shards)
    assert row.is_right and row.accepted > (50 if way == EAGLE else 100) and row.error < 1e-3, row.cells()


def test_drafts_are_verified_until_a_weight_is_another(tmp_path: Path) -> None:
    model, shards = made("llama", SHAPE, tmp_path, 1)
    (row,) = compare_fp32(_in(DRAFTS), "llama", model, SHAPE, shards)
    assert row.is_right and row.accepted > 0 and row.error < 1e-3, row.cells()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[:, 3] += 0.5
    assert not next(compare_fp32(_in(DRAFTS), "llama", model, SHAPE, shards)).is_right


@pytest.mark.parametrize("way", [pytest.param(ADAPTERS, marks=pytest.mark.long), CHANGED])
def test_adapters_are_told_apart_until_their_pages_are_not(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shards = made("llama", SHAPE, tmp_path, 1)
    (row,) = compare_fp32(_in(way), "llama", model, SHAPE, shards)
    assert row.is_right and row.error < 1e-3, row.cells()
    monkeypatch.setattr(adapters.Adapter, "root", property(lambda _: 0, lambda *_: None), raising=False)
    (row,) = compare_fp32(_in(way), "llama", model, SHAPE, shards)
    assert not row.is_right and row.error > 0.05, row.cells()


def test_adapters_beside_rounded_matrices_are_compared_with_the_same_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shards = made("llama", SHAPE, tmp_path, 1)
    row = compare_format(ARGUMENTS, "llama", "bf16 fp8 adapters", model, SHAPE, shards)
    assert row.is_right, row.cells()
    monkeypatch.setattr(
        "benchmarks.gpu.truth_adapters.load_file", lambda path: {k: 1.5 * v for k, v in load_file(path).items()}
    )
    assert not compare_format(ARGUMENTS, "llama", "bf16 fp8 adapters", model, SHAPE, shards).is_right


@pytest.mark.parametrize("name", ["gemma3_text", "glm4_moe"])
def test_what_shards_cannot_say_is_served_from_a_directory(name: str, tmp_path: Path) -> None:
    model, served = made(name, SHAPE, tmp_path, 1)
    assert (served / "config.json").is_file()
    row = next(compare_fp32(ARGUMENTS, name, model, SHAPE, served))
    assert row.is_right and row.tokens > 100 and row.error < 1e-3, row.cells()


def test_a_router_s_near_tie_is_told_from_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(model: Any, _: Any) -> None:
        gate = model.model.layers[-1].mlp.gate.weight.data
        gate[1] = gate[0]  # one of these two experts is chosen, and rounding says which

    monkeypatch.setattr(truth_models, "_draw_the_rest", draw)
    model, served = made("qwen3_moe", SHAPE, tmp_path, 1)
    gate = model.model.layers[-1].mlp.gate.weight.data
    gate[:2] *= torch.tensor([[1.0], [1 + 3e-7]])
    rows = [next(compare_fp32(ARGUMENTS, "qwen3_moe", model, SHAPE, served))]
    gate[:2] *= torch.tensor([[1 + 6e-7], [1.0]])
    rows.append(next(compare_fp32(ARGUMENTS, "qwen3_moe", model, SHAPE, served)))
    assert all(row.is_right for row in rows) and sum(row.tied for row in rows) > 0, [row.cells() for row in rows]
    model.model.layers[1].mlp.experts.down_proj.data[3] *= 1.2
    assert not next(compare_fp32(ARGUMENTS, "qwen3_moe", model, SHAPE, served)).is_right


def test_a_cache_of_fp8_is_compared_with_the_same_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shards = made("qwen3", SHAPE, tmp_path, 1)
    row = compare_format(ARGUMENTS, "qwen3", CACHE, model, SHAPE, shards)
    assert row.is_right and row.error > 1e-3, row.cells()
    monkeypatch.setattr(cached_attention, "pack", lambda x: pack(1.2 * x))
    assert not compare_format(ARGUMENTS, "qwen3", CACHE, model, SHAPE, shards).is_right


def test_a_model_that_becomes_fp8_is_compared_with_what_a_conversion_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shards = made("qwen3", SHAPE, tmp_path, 1)
    row = compare_format(ARGUMENTS, "qwen3", AT_LOAD, model, SHAPE, shards)
    assert row.is_right, row.cells()
    scaled = fp8.quantized
    monkeypatch.setattr(
        f"{HubReader.__module__}.quantized", lambda *given: (scaled(*given)[0], 1.1 * scaled(*given)[1])
    )
    assert not compare_format(ARGUMENTS, "qwen3", AT_LOAD, model, SHAPE, shards).is_right


def test_inputs_are_compared_with_those_that_the_same_scales_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shards = made("llama", SHAPE, tmp_path, 1)
    row = compare_format(ARGUMENTS, "llama", STATIC[0], model, SHAPE, shards)
    assert row.is_right, row.cells()
    monkeypatch.setattr(fp8, "round_statically", lambda x, _: x)
    assert not compare_format(ARGUMENTS, "llama", STATIC[0], model, SHAPE, shards).is_right


def test_experts_in_arrays_are_compared_with_what_they_are_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shards = made("glm4_moe", SHAPE, tmp_path, 1)
    row = compare_format(ARGUMENTS, "glm4_moe", ARRAYS, model, SHAPE, shards)
    assert row.is_right, row.cells()
    one = fused_experts._one
    monkeypatch.setattr(fused_experts, "_one", lambda array, number, shape: one(array, number ^ 1, shape))
    assert not compare_format(ARGUMENTS, "glm4_moe", ARRAYS, model, SHAPE, shards).is_right


def test_an_int8_model_is_compared_with_the_same_rounding(tmp_path: Path) -> None:
    model, shards = made("gpt2", SHAPE, tmp_path, 1)
    row = compare_format(ARGUMENTS, "gpt2", "fp16 int8", model, SHAPE, shards)
    assert row.is_right and row.ratio < 0.1  # a CPU computes in fp32


def test_an_answer_that_takes_a_token_back_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    row, ask = Row("gpt2", "fp32"), draw_requests(SHAPE, 1, 1, is_encoder=False)[0]
    told = Told({"output_ids": torch.zeros(1, 1, 1).numpy()}, is_consistent=False)
    check_answer(row, ask, told, None, None)
    assert row.failed == 1
