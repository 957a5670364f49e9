"""Requests as they come to a GPU: mixed steps, graphs, chunks, known pages, rows set back; tokens are transformers'.

Graphs are replaced by plain calls, and attention reads the pages that a GPU's kernels read: page_reading_ops.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.engines.asking import ask, generated
from support.engines.page_reading_ops import captured_steps
from support.shards.llama_shards import served_of
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB

from backends.fastertransformer.engine.cache.kv_cache import PAGE
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

WINDOW, POSITIONS = 40, 512
WINDOWED, WITHOUT_WINDOWS = ("mistral", "starcoder2", "gemma2", "gpt_oss"), ("llama", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Settings]:
    has_windows = request.param in WINDOWED
    sizes = {"max_position_embeddings": POSITIONS} | ({"sliding_window": WINDOW} if has_windows else {})
    root, model = served_of(request.param, tmp_path_factory.mktemp(request.param), 1, **sizes)
    return model, Settings(root, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22)


def traffic(seed: int) -> list[tuple[list[int], int]]:
    """Prompts around the ends of pages and windows, a third of which begins alike, and how many tokens follow."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(130)]
    asks = []
    for place in range(40):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 31, 33, 64, 90, 127, 200]))]
        asks.append(((shared if place % 3 == 0 else []) + own, rng.choice([5, 20, 40])))
    return asks


def answers_of(steps: Steps, asks: list[tuple[list[int], int]], chunk_tokens: int) -> list[list[Answer]]:
    """Send requests one and two at a time, while those before them decode."""
    scheduler, answers = Scheduler(steps, 16, steps_ahead=True, chunk_tokens=chunk_tokens), list[list[Answer]]()
    for place, (line, count) in enumerate(asks):
        answers.append([])
        scheduler.add(Job(parse_request(ask([line], count, end_id=NEVER), steps.config), answers[-1].append))
        for _ in range(2 * (place % 3)):
            scheduler.step()
    while not scheduler.is_idle:
        scheduler.step()
    return answers


WHOLE, CHUNKS, SET_BACK = (0, 400), (64, 400), (64, 24)
"""Tokens of a chunk and pages of the cache: whole prompts, chunks, and so few pages that rows are set back."""
IN_CI = {
    **{"mistral": (WHOLE, CHUNKS, SET_BACK), "starcoder2": (WHOLE,), "gemma2": (SET_BACK,), "gpt_oss": (CHUNKS,)},
    **{"llama": (SET_BACK,), "qwen3_moe": (WHOLE,), "deepseek_v3": (SET_BACK,)},
}


def each_family() -> list[Any]:
    """Return every family with each of the three, of which CI runs some."""
    return [
        pytest.param(name, *sizes, marks=() if sizes in IN_CI[name] else pytest.mark.long)
        for name in (*WINDOWED, *WITHOUT_WINDOWS)
        for sizes in (WHOLE, CHUNKS, SET_BACK)
    ]


@pytest.mark.parametrize(("opened", "chunk_tokens", "pages"), each_family(), indirect=["opened"])
def test_rows_that_share_steps_get_what_transformers_gives_each(
    opened: tuple[Any, Settings], chunk_tokens: int, pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole prompt longer than a window, beside rows that decode, once read pages that it did without."""
    model, settings = opened
    steps, mixed = captured_steps(settings, pages, monkeypatch, 64, 256, 768), list[int]()
    mix = Steps.mix

    def note_and_mix(own: Steps, ids: Any, *given: Any) -> Any:
        mixed.append(len(ids))
        return mix(own, ids, *given)

    monkeypatch.setattr(Steps, "mix", note_and_mix)
    asks = traffic(chunk_tokens + pages)
    for (line, count), (answer,) in zip(asks, answers_of(steps, asks, chunk_tokens), strict=True):
        assert not isinstance(answer, Failure), answer
        found = generated(answer.tensors)
        assert len(found) == count and found == argmaxes(model, line, found)
    assert len(mixed) > 3


@pytest.mark.parametrize("opened", ["mistral", "gpt_oss", "llama"], indirect=True)
def test_a_pass_that_would_read_what_a_row_has_not_is_refused(
    opened: tuple[Any, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, settings = opened
    steps = captured_steps(settings, 400, monkeypatch, 64)
    scheduler = Scheduler(steps, 16, chunk_tokens=64)
    others, answers = list[Answer](), list[Answer]()
    scheduler.add(Job(parse_request(ask([[5] * 3], 60, end_id=NEVER), steps.config), others.append))
    scheduler.step()
    line = [*range(3, 103)] * 3
    scheduler.add(Job(parse_request(ask([line], 2, end_id=NEVER), steps.config), answers.append))
    scheduler.step()
    begun = scheduler._waiting.begun
    assert begun and begun.skipped and not answers
    begun.reservation.rows[0].pages[begun.skipped // PAGE - 1] = 0
    while not scheduler.is_idle:
        scheduler.step()
    assert "pages of the KV cache that it does not have" in str(answers[0].problem)
    assert others[-1].tensors and len(generated(others[-1].tensors)) == 60
