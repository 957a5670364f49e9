"""The model's own predictor: it drafts what transformers' layer says, and rows say what they say without it."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, ask, generated
from support.engines.draft_loads import loads
from support.engines.drafting_ranks import check_drafting_ranks
from support.engines.drawn_triples import check_draws, expected_triples
from support.engines.every_draft import draft_always, noted_drafts
from support.engines.few_pages import Served
from support.engines.own_drafts import check_answers
from support.engines.paged_steps import paged_steps
from support.shards.llama_shards import served_of
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB, save
from support.tiny_models.predicting_models import COUNTED, Change, never_wrong, pack_experts, save_predicting

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

DRAFTS = (4, True)
LONGER = {"max_position_embeddings": 256}
STEADY = {name: {"rms_norm_eps": 1e-2} for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")}  # see test_engine_hybrids


def settings_of(folder: Path) -> Settings:
    return Settings(folder, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22, speculation="mtp")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    return noted_drafts(monkeypatch)


@pytest.mark.parametrize(
    ("name", "chunk_tokens"),
    [
        *(("glm4_moe", 32), ("deepseek_v3", 0), ("qwen3_next", 32)),
        *(pytest.param(name, 0, marks=pytest.mark.long) for name in ("qwen3_5", "qwen3_5_moe")),
        ("nemotron3", 0),
    ],
)
def test_drafts_are_what_transformers_layer_says(
    name: str, chunk_tokens: int, tmp_path: Path, always: None, said: list[Any]
) -> None:
    """Of several rows, prompts of one token and of pages, which others have begun with, and a conversation."""
    model, predictor = save_predicting(name, tmp_path, **LONGER, **STEADY.get(name, {}))
    if name == "qwen3_5_moe":
        pack_experts(tmp_path / "model.safetensors")
    rng, served = random.Random(5), Served(paged_steps(settings_of(tmp_path)), drafts=DRAFTS, chunk_tokens=chunk_tokens)
    shared = [rng.randrange(3, VOCAB) for _ in range(96)]
    lines = [[rng.randrange(3, VOCAB) for _ in range(count)] for count in (1, 31, 80)]
    for own in (lines, [shared], [shared + [7, 9]]):
        answers = [served.submit(ask([line], 20, end_id=NEVER)) for line in own]
        served.run()
        for line, each in zip(own, answers, strict=True):
            tokens = generated(each[-1].tensors)
            assert tokens == argmaxes(model, line, tokens)
    told = list[int]()
    for turn, line in enumerate(([5, 9, 33], [8] * 30)):
        start = {"START": np.array([[1]], np.int32)} if turn == 0 else {}
        told += line
        told += served.say(ask([line], 5, end_id=NEVER) | start, "talk")
    assert len(said) > 60 and {len(draft) for _, draft in said} == {1, 2, 3, 4}
    for text, draft in said[::3]:
        assert draft == predictor.drafts(text, len(draft)), text


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "pages", "chunk_tokens", "is_gpu"),
    [
        *(("glm4_moe", 16, 32, False), ("glm4_moe", 60, 32, True)),
        *(("deepseek_v3", 60, 0, True), ("deepseek_v3", 16, 0, False), ("qwen3_next", 16, 32, False)),
        ("qwen3_5", 60, 32, True),
    ],
)
def test_rows_answer_what_they_answer_without(
    name: str, pages: int, chunk_tokens: int, is_gpu: bool,
    tmp_path: Path, always: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Beside beams, joining prompts, chunks, known pages and rows that are set back, on pages that are spoiled."""
    save_predicting(name, tmp_path, _often_right(name), **LONGER)
    check_answers(settings_of(tmp_path), DRAFTS, loads(pages)[:9], pages, pages, chunk_tokens, is_gpu, monkeypatch)


def _never_wrong(name: str) -> Change:
    return partial(never_wrong, one=0.0 if name.startswith("qwen3") else 1.0)


def _often_right(name: str) -> Change:
    def change(key: str, each: torch.Tensor) -> torch.Tensor:
        right = _never_wrong(name)(key, each)
        return right + 0.2 * (each - right)

    return change


@pytest.mark.parametrize(
    ("name", "is_fp8"),
    [
        *(("glm4_moe", False), ("qwen3_5", False)),
        *(pytest.param("deepseek_v3", is_fp8, marks=pytest.mark.long) for is_fp8 in (False, True)),
        pytest.param("qwen3_next", True, marks=pytest.mark.long),
    ],
)
def test_a_predictor_that_is_never_wrong_is_always_accepted(
    name: str, is_fp8: bool, tmp_path: Path, always: None
) -> None:
    model, _ = save_predicting(name, tmp_path / "hub", _never_wrong(name), **LONGER)
    given = {"format": "huggingface", "quantization": "fp8"}
    if is_fp8:
        convert(ConvertArguments(tmp_path / "hub", tmp_path / "fp8", 1, "bf16", **given))
    served = Served(paged_steps(settings_of(tmp_path / ("fp8" if is_fp8 else "hub"))), drafts=DRAFTS)
    tokens = served.say(ask([[5, 9, 60]], 100, end_id=NEVER))
    assert is_fp8 or tokens == argmaxes(model, [5, 9, 60], tokens)
    metrics = served.scheduler.metrics
    assert metrics.accepted_tokens == metrics.draft_tokens > 75 and metrics.drafts < 28


@pytest.mark.long
def test_drawn_tokens_have_the_distribution_of_the_model(tmp_path: Path, always: None) -> None:
    model, _ = save_predicting("glm4_moe", tmp_path, _often_right("glm4_moe"), **LONGER)
    line = [5, 9, 60, 33]
    check_draws(Served(paged_steps(settings_of(tmp_path)), drafts=DRAFTS), line, expected_triples(model, line), 900)


@pytest.mark.long
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_next"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_rank_0_predicts_for_all_ranks(name: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    model, _ = save_predicting(name, tmp_path / "hub", _never_wrong(name), **LONGER)
    check_drafting_ranks(tmp_path / "hub", tmp_path, model, "mtp", tensor, pipeline)


def test_a_model_without_a_predictor_is_refused(tmp_path: Path) -> None:
    none = "has no layer that predicts further tokens"
    root, _ = served_of("llama", tmp_path / "shards", 1)
    save("glm4_moe", tmp_path / "none")
    save("ernie4_5_moe", tmp_path / "other", **COUNTED)
    save("nemotron3", tmp_path / "states", **COUNTED, mtp_layers_block_type=["linear_attention"])
    save("glm4_moe", tmp_path / "lacking", **COUNTED)
    for folder, problem in (
        *((root, none), (tmp_path / "none", none), (tmp_path / "other", f"{none}, or ernie4_5_moe none that is run")),
        (tmp_path / "states", "the predictor's layers keep states, which cannot go back by wrong tokens"),
        (tmp_path / "lacking", r"model.layers.\d.eh_proj.weight: missing"),
    ):
        with pytest.raises(EngineError, match=problem):
            open_engine(settings_of(folder), CPU)
