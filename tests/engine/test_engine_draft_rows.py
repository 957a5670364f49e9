"""Speculation beside grammars, sessions, encoders, ranks and numbers that overflow; what it costs; what refuses it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import t5_requests
from support.engines.asking import CPU, Tensors, ask, generated, prompts, tiny_gpt2
from support.engines.few_pages import Served
from support.engines.guessed_drafts import guess
from support.engines.page_reading_ops import PageReadingOps
from support.engines.paged_steps import paged_steps
from support.engines.rank_processes import RankProcesses, answer_of
from support.shards.family_shards import write_family
from support.shards.llama_shards import settings_of, shards_of
from support.shards.random_t5 import random_t5
from support.tiny_models.greedy import NEVER
from support.tiny_models.guided_model import guided, guided_gpt2, texts
from support.tiny_models.huggingface_models import build

from backends.fastertransformer.engine import loading
from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.errors import EngineError
from backends.fastertransformer.engine.rows.answer import Failure
from backends.fastertransformer.engine.rows.prompt_lookup import PromptLookup
from backends.fastertransformer.engine.scheduling import speculation
from backends.fastertransformer.engine.scheduling.tuning import TUNING, Tuning
from backends.fastertransformer.engine.settings import Settings

DRAFTS = (6, True)


def test_a_lookup_finds_what_followed_last_on_the_longest_match() -> None:
    """Compared with a search through the whole text, at every length of many texts of few tokens."""
    for seed in range(30):
        rng = random.Random(seed)
        prompt = [rng.randrange(4) for _ in range(rng.randrange(0, 30))]
        text, lookup = list(prompt), PromptLookup(np.array(prompt, np.int64))
        for _ in range(40):
            found: list[int] = []
            for size in (4, 2):
                places = [at for at in range(size, len(text)) if text[at - size : at] == text[-size:]]
                if places and not found:
                    longer = text[places[-1] :]
                    found = [*longer, *longer * 6][:6]
            assert lookup.draft(6) == found
            text += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
            lookup.follow(text[len(prompt) :])


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have drafts in every step, as long as may be, whatever came of earlier ones."""
    monkeypatch.setattr(speculation, "TUNING", Tuning(draft_row_cost_cpu=0.0, acceptance_prior=0.9))


SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x1", "yy"]}}}'


@pytest.mark.parametrize("way", [{"runtime_top_p": 0.0}, {}])
@pytest.mark.parametrize(("kind", "text"), [("json_schema", SCHEMA), ("regex", "(ab|ba|[0-9]x){8,40}")])
def test_grammars_cut_drafts_and_rows_follow_them(
    kind: str, text: str, way: dict[str, Any], always: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(guided_gpt2(tmp_path, speculation="ngram"), CPU)
    request = guided([kind], [text], 60, **way)
    plain = request | {"max_speculative_tokens": np.array([[0]], np.int32)}
    expected = answer_of(engine, plain)
    assert engine.metrics.drafts == 0 and texts(expected)[0]
    for wrong in (0.0, 0.3):
        guess(monkeypatch, {(5, 6, 7): generated(expected)}, wrong, engine.config.vocab_size)
        np.testing.assert_array_equal(answer_of(engine, request)["output_ids"], expected["output_ids"])
    assert engine.metrics.accepted_tokens > 5
    engine.close()


def test_a_conversation_goes_on_and_one_with_a_memory_has_no_drafts(
    always: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a wrong draft has written behind the conversation's end is not seen when it goes on."""
    steps, turns = paged_steps(tiny_gpt2(tmp_path)[1], 40), prompts(9, 4, 3)
    for memory in (0, 10):
        said: list[list[list[int]]] = []
        for drafts in ((0, False), DRAFTS):
            served, told = Served(steps, drafts=drafts), list[list[int]]()
            for turn, line in enumerate(turns):
                request = ask([line], 9, end_id=NEVER)
                if turn == 0:
                    request |= {"START": np.array([[1]], np.int32), "memory_len": np.array([[memory]], np.uint32)}
                monkeypatch.setattr(PromptLookup, "draft", lambda lookup, most: [7, 8, 9, 10, 11, 12][:most])
                told.append(served.say(request, "talk"))
            said.append(told)
        assert said[0] == said[1] and (served.scheduler.metrics.draft_tokens > 0) == (memory == 0)


def test_an_encoder_decoder_repeats_its_input(always: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = t5_requests.settings_of(write_family(random_t5(), tmp_path, 1))
    engine, lines = open_engine(replace(settings, speculation="ngram"), CPU), t5_requests.sources(9, 4, 14)
    request = t5_requests.ask(lines, 20, end_id=NEVER, is_return_log_probs=True)
    none = np.zeros((3, 1), np.int32)
    expected = answer_of(engine, request | {"max_speculative_tokens": none})
    known = {tuple(line): expected["output_ids"][row, 0].tolist() for row, line in enumerate(lines)}
    guess(monkeypatch, known, 0.2, engine.config.vocab_size)
    found = answer_of(engine, request)
    np.testing.assert_array_equal(found["output_ids"], expected["output_ids"])
    np.testing.assert_allclose(found["output_log_probs"], expected["output_log_probs"], atol=1e-4)
    assert engine.metrics.accepted_tokens > 10
    engine.close()


RANKS = [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)]


@pytest.mark.parametrize(("tensor", "pipeline"), RANKS)
def test_drafts_over_ranks_give_what_one_process_gives_without(tensor: int, pipeline: int, tmp_path: Path) -> None:
    shards, _ = shards_of("llama", tmp_path, tensor, max_position_embeddings=128)
    rng = random.Random(4)
    requests = [ask([[rng.randrange(3, 90) for _ in range(5)] * 4], 60, end_id=NEVER) for _ in range(3)]
    requests.append(requests[0] | {"runtime_top_k": np.array([[3]], np.uint32)})
    asked = [each | {"max_speculative_tokens": np.array([[4]], np.int32)} for each in requests]
    ranks = RankProcesses(shards, tmp_path, tensor, pipeline, asked, model_type="Llama")
    try:
        alone = open_engine(Settings(shards, tensor, 1, "fp32", 1, "Llama", has_process_per_rank=False), CPU)
        expected = [answer_of(alone, each) for each in requests]
        assert alone.metrics.drafts == 0
        for each in asked:
            answer_of(alone, each)
        assert alone.metrics.accepted_tokens > 10
        assert set(ranks.wait(240)) == {0}, ranks.text
    finally:
        ranks.stop()
    for ours, theirs in zip(ranks.answers, expected, strict=True):
        np.testing.assert_array_equal(ours["output_ids"], theirs["output_ids"])


def test_a_wrong_draft_of_numbers_that_overflow_leaves_nothing(
    always: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is set back; what comes later on its pages, or goes on from them, is as it was."""
    steps, broken = paged_steps(settings_of("llama", tmp_path)[1], 20), 118
    with torch.inference_mode():
        steps.network.weights.token_embedding[broken] = float("inf")
    for more in ({}, {"runtime_top_k": 4, "random_seed": 5}):
        request, said = ask(prompts(20, 9, 4), 20, end_id=NEVER, **more), list[Tensors]()
        for draft in ([], [broken, 4, 5]):
            monkeypatch.setattr(PromptLookup, "draft", lambda lookup, most, draft=draft: draft[:most])
            served = Served(steps, drafts=DRAFTS)
            for _ in range(2):
                answers = served.submit(request)
                served.run()
                assert not isinstance(answers[-1], Failure), answers[-1]
                said.append(answers[-1].tensors)
        assert served.scheduler.metrics.drafts == 6
        for each in said[1:]:
            np.testing.assert_array_equal(each["output_ids"], said[0]["output_ids"])
    assert all(block[:, 1:].isfinite().all() for block in steps.cache.kv)


def test_drafts_that_are_wrong_end_and_those_that_are_right_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the costs in Tuning: what wrong ones cost stays below 2% of the steps."""
    steps, line = paged_steps(guided_gpt2(tmp_path), 100), [5, 6, 7]
    cost, said = TUNING.draft_row_cost_cpu, Served(steps).say(ask([line], 250, end_id=NEVER))
    for is_right, rows in ((False, 1), (False, 5), (True, 1)):
        guess(monkeypatch, {(5, 6, 7): said if is_right else [token ^ 1 for token in said]}, 0.0, 97)
        served = Served(steps, drafts=(8, True))
        served.submit(ask([line] * rows, 250, end_id=NEVER))
        served.run()
        metrics = served.scheduler.metrics
        if is_right:
            assert metrics.drafts < 40 and metrics.accepted_tokens > 200 and metrics.accepted_by_place[7] > 15
        else:
            assert metrics.accepted_tokens < 10 and 0 < metrics.draft_tokens * cost < 0.02 * 250 * (1 + cost * rows)


def test_a_model_whose_attention_has_a_bias_refuses_drafts_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(write_family(build("bloom"), tmp_path), 1, 1, "fp32", 1, "GPT", kv_cache_bytes=1 << 22)
    monkeypatch.setattr(loading, "choose_ops", PageReadingOps)
    steps = paged_steps(settings)
    with pytest.raises(EngineError, match="speculation = ngram .*: on a GPU this model's rows are continued by torch"):
        loading._check_drafts(replace(settings, speculation="ngram"), steps)
    served = Served(steps)
    served.scheduler._speculation._most = 4
    (refused,) = served.submit(ask([[5, 6]], 3) | {"max_speculative_tokens": np.array([[2]], np.int32)})
    assert isinstance(refused, Failure)
    assert "max_speculative_tokens is 2, and on a GPU this model's rows" in refused.problem
