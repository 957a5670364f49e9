"""Decode steps that are captured for more rows than decode: rows that join in the same step must not be its padding."""

from __future__ import annotations

import contextlib
import gc
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines.asking import Tensors, ask, prompts, tiny_gpt2
from support.engines.faked_graphs import fake_graphs
from support.engines.paged_steps import paged_steps
from support.shards.llama_shards import settings_of

from backends.fastertransformer.engine.cache.kv_cache import PAGE
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.steps.graphs import StepGraphs
from backends.fastertransformer.engine.steps.steps import Steps

NEVER = 4000  # an end_id outside the vocabulary


def answers_of(steps: Steps, requests: list[Tensors]) -> list[Tensors]:
    """Each request joins while those before it decode."""
    scheduler, answers = Scheduler(steps, 8, steps_ahead=True), list[list[Answer]]()
    for tensors in requests:
        answers.append([])
        scheduler.add(Job(parse_request(tensors, steps.config), answers[-1].append))
        scheduler.step()
    while not scheduler.is_idle:
        scheduler.step()
    return [dict(each[0].tensors) for each in answers]


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_a_row_that_joins_a_padded_step_gets_what_it_gets_alone(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_gpt2(tmp_path)[1] if family == "gpt2" else settings_of(family, tmp_path)[1]
    # At the end of a page, so that what padding writes behind a context would be in the cache of the next row.
    lines = prompts(5, PAGE - 1, PAGE, 3)
    ways = [{}, {"runtime_top_k": 5, "random_seed": 7}, {"is_return_log_probs": True}, {"beam_width": 2}]
    requests = [ask([line], 8, end_id=NEVER, **way) for line, way in zip(lines, ways, strict=True)]
    alone = [answers_of(paged_steps(settings), [tensors])[0] for tensors in requests]
    fake_graphs(monkeypatch)
    steps = paged_steps(settings)
    steps.capture(8, 0)
    for ours, theirs in zip(answers_of(steps, requests), alone, strict=True):
        assert set(ours) == set(theirs)
        for name, values in theirs.items():
            np.testing.assert_allclose(ours[name], values, atol=1e-4, err_msg=name)


def test_the_logits_of_all_captured_steps_are_in_the_same_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size's own would take gigabytes where the vocabulary is large."""
    fake_graphs(monkeypatch)
    steps = paged_steps(tiny_gpt2(tmp_path)[1])
    for size in (8, 2):
        steps.capture(size, 0)
    found = [steps.decode(count)[0] for count in (3, 1)]
    assert len({logits.untyped_storage().data_ptr() for logits in found}) == 1
    assert found[0].untyped_storage().nbytes() == (256 + 8) * steps.config.vocab_size * 4


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_rows_that_decode_take_part_in_large_inputs_of_a_mixture(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts are read once then, though kernels are launched one by one."""
    fake_graphs(monkeypatch)
    steps = paged_steps(settings_of(family, tmp_path)[1])
    monkeypatch.setattr(steps.network, "can_capture_continued", True)
    monkeypatch.setattr(StepGraphs, "_run_mixed", lambda *_: None)
    monkeypatch.setattr(StepGraphs, "_run_contexts", lambda *_: None)
    for size in ((0, 1024, 0, 0), (0, 0, 0, 64)):
        steps.capture(*size)
    found = {(rows, tokens): steps.can_mix(rows, tokens) for rows in (4, 16) for tokens in (32, 512, 1025)}
    of_mixture = family == "qwen3_moe"
    assert found == {
        **{(rows, 32): True for rows in (4, 16)},  # there is a graph
        **{(rows, 1025): True for rows in (4, 16)},  # no graph has room
        (4, 512): False,  # few rows read few experts
        (16, 512): of_mixture,
    }


def test_closed_steps_hold_no_graph_though_the_engine_has_frozen_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL closes no connection while a graph uses it, and gc.collect() leaves frozen cycles of objects alone."""

    class FakedGraph:
        """In place of CUDA's."""

    captured = list[weakref.ref[FakedGraph]]()

    def capture(graph: FakedGraph, *_: object, **ways: object) -> contextlib.AbstractContextManager[None]:
        captured.append(weakref.ref(graph))
        return contextlib.nullcontext()

    steps = paged_steps(tiny_gpt2(tmp_path)[1])
    stream = type("FakedStream", (), {"wait_stream": lambda *_: None, "synchronize": lambda *_: None})
    for name, fake in {"CUDAGraph": FakedGraph, "graph": capture, "Stream": stream, "current_stream": stream}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    steps.capture(8, 0)
    gc.freeze()
    try:
        assert [each() is None for each in captured] == [False]
        steps.close()
        assert [each() is None for each in captured] == [True]
    finally:
        gc.unfreeze()
