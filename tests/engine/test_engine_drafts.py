"""Speculation: rows with drafts say what they say without, token by token and draw by draw."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
from support.engines.asking import Tensors, ask, generated
from support.engines.draft_loads import loads, run, same, texts_of
from support.engines.drawn_triples import check_draws, expected_triples
from support.engines.few_pages import Served, spoiled
from support.engines.guessed_drafts import guess
from support.engines.page_reading_ops import captured_steps
from support.engines.paged_steps import paged_steps
from support.shards.llama_shards import served_of
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB

from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.rows.prompt_lookup import PromptLookup
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling import speculation
from backends.fastertransformer.engine.scheduling.tuning import Tuning
from backends.fastertransformer.engine.settings import Settings

DRAFTS = (6, True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Settings]:
    root, model = served_of("llama", tmp_path_factory.mktemp("llama"), 1, max_position_embeddings=256)
    return model, Settings(root, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have drafts in every step, as long as may be, whatever came of earlier ones."""
    monkeypatch.setattr(speculation, "TUNING", Tuning(draft_row_cost_cpu=0.0, acceptance_prior=0.9))


def job_of(served: Served, tensors: Tensors) -> tuple[Job, list[Answer]]:
    """Send a request that streams."""
    answers: list[Answer] = []
    job = Job(parse_request(tensors, served.steps.config), answers.append, is_streaming=True)
    served.scheduler.add(job)
    return job, answers


_CASES = ((400, 32, False, 0.2), (400, 0, False, 0.0), (16, 0, False, 1.0))
_LONG = [pytest.param(*each, marks=pytest.mark.long) for each in _CASES]


@pytest.mark.parametrize(
    ("pages", "chunk_tokens", "is_gpu", "wrong"), [(16, 0, False, 0.2), (60, 32, True, 0.2), *_LONG]
)
def test_rows_with_drafts_answer_what_they_answer_without(
    llama: tuple[Any, Settings], always: None, pages: int, chunk_tokens: int, is_gpu: bool, wrong: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Right, partly right and wrong drafts, beside beams, joining prompts, chunks, known pages; rows are set back."""
    _, settings = llama
    steps = captured_steps(settings, pages, monkeypatch, 64, 256) if is_gpu else paged_steps(settings, pages)
    requests, ways = loads(pages), {"chunk_tokens": chunk_tokens, "steps_ahead": is_gpu}
    # Torch multiplies what follows on half a page by 0 where a chunk goes on there, so that may be no NaN.
    with spoiled(steps) if is_gpu or not chunk_tokens else nullcontext():
        expected = run(Served(steps, **ways), requests, pages)
        guess(monkeypatch, texts_of(requests, expected), wrong, VOCAB)
        served = Served(steps, **ways, drafts=DRAFTS)
        for found, each in zip(run(served, requests, pages), expected, strict=True):
            same(found[-1], each[-1])
    metrics = served.scheduler.metrics
    assert metrics.draft_tokens > 100 and sum(metrics.accepted_by_place) == metrics.accepted_tokens
    assert (metrics.accepted_tokens > metrics.draft_tokens / 4) == (wrong < 1)
    assert metrics.preemptions or pages > 16


def test_greedy_rows_say_what_transformers_says_and_streams_repeat_nothing(
    llama: tuple[Any, Settings], always: None
) -> None:
    """Drafts are looked up here; an answer of a stream has one token more than the one before, or several."""
    model, settings = llama
    rng, served = random.Random(5), Served(paged_steps(settings, 100), drafts=DRAFTS)
    lines = [[rng.randrange(3, VOCAB) for _ in range(rng.choice([4, 20]))] * 3 for _ in range(12)]
    jobs = [job_of(served, ask([line], 100, end_id=NEVER)) for line in lines]
    served.run()
    for line, (_, answers) in zip(lines, jobs, strict=True):
        said = [generated(each.tensors) for each in answers]
        assert all(now[: len(before)] == before and len(now) > len(before) for before, now in pairwise(said))
        assert len(said[-1]) == 100 and said[-1] == argmaxes(model, line, said[-1])
    assert served.scheduler.metrics.accepted_tokens > 50
    assert min(len(answers) for _, answers in jobs) < 95
    assert served.scheduler.metrics.generation_tokens == 1200


def test_drawn_tokens_have_the_distribution_of_the_model(
    llama: tuple[Any, Settings], always: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs of tokens behind one prompt, with drafts that are right for some rows, against transformers' softmax."""
    model, settings = llama
    line = [5, 9, 60, 33]
    expected = expected_triples(model, line)
    draft = list(max(expected, key=lambda key: expected[key]))
    monkeypatch.setattr(PromptLookup, "draft", lambda lookup, most: draft[len(lookup.tokens) - len(line) :][:most])
    check_draws(Served(paged_steps(settings, 400), drafts=DRAFTS), line, expected, 1500)
