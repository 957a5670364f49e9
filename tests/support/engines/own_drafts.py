"""Models beside which something drafts (a draft model, a predictor, a head): with it they answer as without it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.settings import Settings, read_settings
from export_scripts.repository.pbtxt import parse
from support.engines.asking import CPU, Tensors, ask, generated
from support.engines.draft_loads import run, same
from support.engines.few_pages import Served, spoiled
from support.engines.page_reading_ops import captured_steps
from support.engines.paged_steps import paged_steps
from support.tiny_models.greedy import NEVER, argmaxes


def check_answers(
    settings: Settings,
    drafts: tuple[int, bool],
    requests: list[Tensors],
    pages: int,
    seed: int,
    chunk_tokens: int,
    is_gpu: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests are answered twice, on pages that are spoiled; few pages set rows back, and steps may be a GPU's."""
    steps = captured_steps(settings, pages, monkeypatch, 64, 256) if is_gpu else paged_steps(settings, pages)
    assert steps.drafting
    for sizes in ((4, 0), (16, 0), (0, 0, 64)) if is_gpu else ():
        steps.drafting.capture(*sizes)
    ways: dict[str, Any] = {"chunk_tokens": chunk_tokens, "steps_ahead": is_gpu}
    with spoiled(steps) if is_gpu or not chunk_tokens else nullcontext():
        drafting, steps.drafting = steps.drafting, None
        expected = run(Served(steps, **ways), requests, seed)
        steps.drafting = drafting
        served = Served(steps, **ways, drafts=drafts)
        for found, each in zip(run(served, requests, seed), expected, strict=True):
            same(found[-1], each[-1])
    metrics = served.scheduler.metrics
    assert metrics.draft_tokens > 100 and metrics.accepted_tokens > 0
    assert metrics.preemptions or pages > 16


def check_repository(repository: Path, model: Any, drafts_by: str) -> None:
    """An engine that is started as a repository says drafts; the drafts are right, and tokens are transformers'."""
    config = parse((repository / "fastertransformer/config.pbtxt").read_text())
    told = {key: value.string_value for key, value in config.parameters.items()}
    settings = read_settings(told, repository / "fastertransformer", "1")
    engine = open_engine(replace(settings, cpu_threads=1, kv_cache_bytes=1 << 22), CPU)
    assert f"{drafts_by} of" in engine.description
    (outputs,) = engine.generate([engine.parse(ask([[5, 9, 33]], 40, end_id=NEVER))])
    assert generated(outputs) == argmaxes(model, [5, 9, 33], generated(outputs))
    assert engine.metrics.accepted_tokens == engine.metrics.draft_tokens > 0
    engine.close()
