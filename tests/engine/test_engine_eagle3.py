"""An EAGLE-3 head: it drafts what modules of transformers say, and rows say what they say without it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

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
from support.tiny_models.eagle_heads import RIGHT, SHARED, SPECULATORS, TAPS, never_wrong, save_with_head
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB, save

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.settings import Settings

DRAFTS = (4, True)


def settings_of(folder: Path, pipeline: int = 1) -> Settings:
    return Settings(folder, 1, pipeline, "fp32", 1, "Llama", kv_cache_bytes=1 << 22, speculation="eagle3")


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    return noted_drafts(monkeypatch)


@pytest.mark.parametrize(
    "form",
    [
        {"layout": SPECULATORS, "norm_before_residual": True},
        {"without": ("embed_tokens.weight",), "norm_output": True, "changes": {"attention_bias": True}},
        pytest.param(SHARED, marks=pytest.mark.long),
        pytest.param({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}, marks=pytest.mark.long),
    ],
)
def test_drafts_are_what_transformers_modules_say(
    form: dict[str, Any], tmp_path: Path, always: None, said: list[Any]
) -> None:
    """Of several rows, prompts of one token and of pages, and one that begins with pages of another."""
    if "eagle_config" in form:
        form = {**form, "eagle_aux_hidden_state_layer_ids": None}
    model, head = save_with_head(tmp_path, tmp_path / "draft", **form)
    rng, served = random.Random(5), Served(paged_steps(settings_of(tmp_path)), drafts=DRAFTS, chunk_tokens=32)
    shared = [rng.randrange(3, VOCAB) for _ in range(96)]
    lines = [[rng.randrange(3, VOCAB) for _ in range(count)] for count in (1, 31, 80)]
    for own in (lines, [shared], [shared + [7, 9]]):
        answers = [served.submit(ask([line], 20, end_id=NEVER)) for line in own]
        served.run()
        for line, each in zip(own, answers, strict=True):
            tokens = generated(each[-1].tensors)
            assert tokens == argmaxes(model, line, tokens)
    assert len(said) > 60 and {len(draft) for _, draft in said} == {1, 2, 3, 4}
    for text, draft in said[::3]:
        assert draft == head.drafts(text, len(draft)), text


def test_what_is_kept_of_tokens_is_what_transformers_hidden_states_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, head = save_with_head(tmp_path, tmp_path / "draft")
    steps, line = paged_steps(settings_of(tmp_path)), list(range(3, 50))
    found, keep = list[torch.Tensor](), steps.cache.keep

    def noted(kept: torch.Tensor, *where: Any) -> None:
        found.append(kept.clone())
        keep(kept, *where)

    monkeypatch.setattr(steps.cache, "keep", noted)
    Served(steps).say(ask([line], 4, end_id=NEVER))
    assert (torch.cat(found)[: len(line)] - head.fused(line)[0]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("pages", "seed", "chunk_tokens", "is_gpu"),
    [(16, 7, 32, False), pytest.param(60, 8, 0, True, marks=pytest.mark.long)],
)
def test_rows_answer_what_they_answer_without(
    pages: int, seed: int, chunk_tokens: int, is_gpu: bool,
    tmp_path: Path, always: None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Beside beams, joining prompts, chunks, known pages and rows that are set back, on pages that are spoiled."""
    save_with_head(tmp_path, tmp_path / "draft", **{**RIGHT, "change": _often_right})
    check_answers(settings_of(tmp_path), DRAFTS, loads(seed)[:9], pages, seed, chunk_tokens, is_gpu, monkeypatch)


def _often_right(key: str, each: torch.Tensor) -> torch.Tensor:
    right = never_wrong(key, each)
    return right + 0.1 * (each - right)


def test_a_head_that_is_never_wrong_is_always_accepted(tmp_path: Path, always: None) -> None:
    model, _ = save_with_head(tmp_path, tmp_path / "draft", **RIGHT)
    served = Served(paged_steps(settings_of(tmp_path)), drafts=DRAFTS)
    tokens = served.say(ask([[5, 9, 60]], 100, end_id=NEVER))
    assert tokens == argmaxes(model, [5, 9, 60], tokens)
    metrics = served.scheduler.metrics
    assert metrics.accepted_tokens == metrics.draft_tokens > 75 and metrics.drafts < 25


@pytest.mark.long
def test_drawn_tokens_have_the_distribution_of_the_model(tmp_path: Path, always: None) -> None:
    model, _ = save_with_head(tmp_path, tmp_path / "draft", **{**RIGHT, "change": _often_right})
    line = [5, 9, 60, 33]
    check_draws(Served(paged_steps(settings_of(tmp_path)), drafts=DRAFTS), line, expected_triples(model, line), 900)


@pytest.mark.long
def test_rank_0_drafts_for_two_that_share_layers(tmp_path: Path) -> None:
    """Its head is its own: that of the model is shared by the ranks."""
    model, _ = save_with_head(
        tmp_path / "hub", tmp_path / "hub/draft", **{**RIGHT, "without": ("embed_tokens.weight",)}
    )
    check_drafting_ranks(tmp_path / "hub", tmp_path, model, "eagle3", 2, 1)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    def refuse(*problems: str, form: dict[str, Any] | None = None, **keys: Any) -> None:
        save_with_head(tmp_path / "hub", tmp_path / "hub/draft", **(form or {}))
        about = tmp_path / "hub/draft/config.json"
        about.write_text(json.dumps({**json.loads(about.read_text()), **keys}))
        with pytest.raises(EngineError) as error:
            open_engine(settings_of(tmp_path / "hub"), CPU)
        for problem in problems:
            assert problem in str(error.value)

    refuse("MistralForCausalLM", "LlamaForCausalLMEagle3", architectures=["MistralForCausalLM"])
    refuse("hidden_size: 32  (the model's width is 64)", form={"changes": {"hidden_size": 32}})
    refuse("vocab_size: 110  (the model's vocabulary is 120)", vocab_size=110)
    refuse("num_hidden_layers: 2  (a head of one layer is served)", num_hidden_layers=2)
    refuse("norm_before_fc: True", "fc_norm: True", norm_before_fc=True, fc_norm=True)
    refuse("[1, 3]", "3 different hidden states of the model's 6 layers", eagle_aux_hidden_state_layer_ids=TAPS[:2])
    refuse("stands for [2, 3, 3]", eagle_aux_hidden_state_layer_ids=None)
    lacking = ("fc.weight", "midlayer.mlp.up_proj.weight", "d2t")
    refuse(*(f"{name}: missing" for name in lacking), form={"without": lacking})
    refuse("lm_head.weight: missing", form={"without": ("lm_head.weight",)})
    refuse(
        "midlayer.self_attn.q_proj.bias: the head that",
        form={"changes": {"attention_bias": True}},
        attention_bias=False,
    )
    refuse("tie_word_embeddings: True", form=SHARED, tie_word_embeddings=True)
    refuse("target_hidden_size: 48  (the model's width is 64)", target_hidden_size=48)
    wrong = "lm_head.weight: [50, 64], expected [40, 64]", "d2t: I64 [50], expected I64 [40]"
    refuse(*wrong, draft_vocab_size=40)


def test_models_that_no_head_drafts_for_are_refused(tmp_path: Path) -> None:
    root, _ = served_of("llama", tmp_path / "shards", 1)
    save_with_head(tmp_path / "hub", tmp_path / "head")
    save("nemotron_h", tmp_path / "states")
    for settings, problem in (
        (settings_of(root), "speculation eagle3 with FasterTransformer's shards"),
        (settings_of(tmp_path / "hub", pipeline=2), "speculation eagle3 with 2 pipeline stages"),
        (settings_of(tmp_path / "states"), "speculation eagle3 with layers that keep states"),
        (settings_of(tmp_path / "hub"), "has no config.json: export it again with draft_model"),
    ):
        with pytest.raises(EngineError, match=problem):
            open_engine(settings, CPU)
