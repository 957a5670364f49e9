"""Speculation where layers keep states: rows with drafts say what they say without, and what transformers says."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines.asking import ask, generated
from support.engines.draft_loads import loads, run, same, texts_of
from support.engines.faked_graphs import DoneAgain
from support.engines.few_pages import Served, spoiled
from support.engines.guessed_drafts import guess
from support.engines.page_reading_ops import captured_steps
from support.engines.paged_steps import paged_steps
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB, save
from support.tiny_models.low_rank import ALL, STATES, draw, merged, write

from backends.fastertransformer.engine.request.adapters import Adapters
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling import speculation
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.scheduling.tuning import Tuning
from backends.fastertransformer.engine.settings import Settings

DRAFTS = (6, True)
POSITIONS = 256


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows have drafts in every step, as long as may be, whatever came of earlier ones."""
    monkeypatch.setattr(speculation, "TUNING", Tuning(draft_row_cost_cpu=0.0, acceptance_prior=0.9))


def saved(name: str, directory: Path) -> tuple[Any, Settings]:
    changes = {"rms_norm_eps": 1e-2} if name.startswith("qwen3") else {}  # see test_engine_hybrids
    model = save(name, directory, max_position_embeddings=POSITIONS, **changes)
    return model, Settings(directory, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which graphs are replayed, and their sizes."""
    noted, replay = list[tuple[str, int]](), DoneAgain.replay

    def note_and_replay(own: DoneAgain, size: int) -> Any:
        noted.append((own.run.__name__, size))
        return replay(own, size)

    monkeypatch.setattr(DoneAgain, "replay", note_and_replay)
    return noted


_LONG = ("falcon_h1_norm", 400, False, 0.2), ("qwen3_5", 16, False, 1.0), ("falcon_h1_norm", 16, True, 1.0)


@pytest.mark.parametrize(
    ("name", "pages", "is_gpu", "wrong"),
    [
        *(("nemotron_h", 16, False, 0.2), ("nemotron_h", 60, True, 0.2)),
        *(("qwen3_next", 60, False, 0.4), ("qwen3_5", 16, True, 0.2)),
        *(pytest.param(*each, marks=pytest.mark.long) for each in _LONG),
    ],
)
def test_rows_with_drafts_answer_what_they_answer_without(
    name: str, pages: int, is_gpu: bool, wrong: float,
    tmp_path: Path, replayed: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Right, partly right and wrong drafts, beside beams, joining prompts, chunks, known pages; rows are set back."""
    _, settings = saved(name, tmp_path)
    steps = captured_steps(settings, pages, monkeypatch, 64, 256) if is_gpu else paged_steps(settings, pages)
    requests, ways = loads(pages)[:9], {"chunk_tokens": 32, "steps_ahead": is_gpu}
    replayed.clear()
    with spoiled(steps) if is_gpu else nullcontext():
        expected = run(Served(steps, **ways), requests, pages)
        guess(monkeypatch, texts_of(requests, expected), wrong, VOCAB)
        served = Served(steps, **ways, drafts=DRAFTS)
        for found, each in zip(run(served, requests, pages), expected, strict=True):
            same(found[-1], each[-1])
    metrics = served.scheduler.metrics
    assert metrics.draft_tokens > 100 and (metrics.accepted_tokens > metrics.draft_tokens / 5) == (wrong < 1)
    assert metrics.preemptions or pages > 16
    # Nothing overwrites what drafts have left until they are settled.
    of_drafts = [pair for pair in pairwise(replayed) if "_run_drafts" in pair[0] or "_settle_drafts" in pair[1]]
    assert bool(of_drafts) == is_gpu
    assert all(pair == (("_run_drafts", 64), ("_settle_drafts", 64)) for pair in of_drafts)


@pytest.mark.long
@pytest.mark.parametrize("has_graph", [True, False])
def test_rows_with_adapters_have_drafts_too(has_graph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a graph, or without one; tokens are transformers', with the adapter merged."""
    model, settings = saved("falcon_h1_norm", tmp_path)
    pairs = draw(model, 3, targets=(*ALL, *STATES))
    write(tmp_path / "adapters/a", pairs, lora_alpha=6)
    steps, adapters = captured_steps(settings, 60, monkeypatch), Adapters()
    adapters.use(steps, steps.config.decoder, tmp_path)
    if has_graph:
        steps.capture(0, 0, 64, 0, 1)
    known, models = dict[tuple[int, ...], list[int]](), {"": model, "a": merged(model, pairs, 1.5)}
    for drafts in ((0, False), DRAFTS):
        scheduler, said = Scheduler(steps, 8, steps_ahead=True, drafts=drafts), dict[tuple[int, ...], list[Answer]]()
        for line, name in (((5, 9, 33), "a"), ((7, 8), ""), ((60, 3), "a")):
            tensors = ask([list(line)], 60, end_id=NEVER, lora_name=np.array([name], object))
            said[line] = list[Answer]()
            scheduler.add(Job(parse_request(tensors, steps.config, None, adapters), said[line].append))
        while not scheduler.is_idle:
            scheduler.step()
        found = {line: generated(answers[-1].tensors) for line, answers in said.items()}
        assert known in ({}, found)
        known = found
        guess(monkeypatch, known, 0.2, VOCAB)
    assert scheduler.metrics.accepted_tokens > 50
    for line, name in (((5, 9, 33), "a"), ((7, 8), "")):
        assert known[line] == argmaxes(models[name], list(line), known[line])


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("nemotron3", marks=pytest.mark.long)])
def test_a_conversation_goes_on_from_a_state_that_drafts_have_not_passed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose tokens are transformers'; it is kept where a page ends, and drafts end there too."""
    model, settings = saved(name, tmp_path)
    rng, served, line = random.Random(3), Served(paged_steps(settings, 60), drafts=DRAFTS), [5, 9, 33]
    served.allocator.prefixes._most_unused = 60
    for count, known in ((60, 0), (50, 32), (40, 96)):
        before = served.allocator.prefixes.found
        expected = Served(paged_steps(settings, 60)).say(ask([line], count, end_id=NEVER))
        guess(monkeypatch, {tuple(line): expected}, 0.2, VOCAB)
        said = served.say(ask([line], count, end_id=NEVER))
        assert said == expected == argmaxes(model, line, said)
        assert served.allocator.prefixes.found - before == known
        line = [*line, *said, *(rng.randrange(3, VOCAB) for _ in range(5))]
    assert served.scheduler.metrics.accepted_tokens > 60
