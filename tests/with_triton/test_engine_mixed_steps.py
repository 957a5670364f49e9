"""Steps in which rows decode and a prompt is run in part, as a GPU takes them: against whole prompts by torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, Tensors, ask, prompts
from support.engines.faked_gpu import fake_gpu, launch_few_programs
from support.engines.paged_steps import poisoned_states
from torch import Tensor

from backends.fastertransformer.engine.cache.kv_cache import KvCache
from backends.fastertransformer.engine.cache.sizing import CacheShape
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import choose_precision
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops.kernels import grouped_prefill, row_blocks
from backends.fastertransformer.engine.ops.packed_rows import NumberedRows
from backends.fastertransformer.engine.request.parse import parse_request
from backends.fastertransformer.engine.rows.answer import Answer
from backends.fastertransformer.engine.rows.sequence import Job
from backends.fastertransformer.engine.scheduling import chunks
from backends.fastertransformer.engine.scheduling.scheduler import Scheduler
from backends.fastertransformer.engine.scheduling.tuning import TUNING
from backends.fastertransformer.engine.steps import graphs, warmup
from backends.fastertransformer.engine.steps.graphs import StepGraphs
from backends.fastertransformer.engine.steps.steps import Steps
from benchmarks.gpu.agreement import AgreementArguments, write_checkpoint

BUDGET, NEVER = 8, 4000


def answers_of(steps: Steps, budget: int) -> list[Tensors]:
    """Two rows decode while a longer prompt comes."""
    scheduler, answers = Scheduler(steps, 8, steps_ahead=True, chunk_tokens=budget), list[list[Answer]]()
    lines = [[token % 50 for token in prompt] for prompt in prompts(5, 3, 17)]
    told: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.2}, {"is_return_context_log_probs": True}]
    for place, (line, more) in enumerate(zip(lines, told, strict=True)):
        answers.append([])
        tensors = ask([line], 6 if place < 2 else 2, end_id=NEVER, is_return_log_probs=True, **more)
        scheduler.add(Job(parse_request(tensors, steps.config), answers[-1].append))
        scheduler.step()
    while not scheduler.is_idle:
        scheduler.step()
    assert steps.cache.allocator.free == steps.cache.allocator.count
    return [dict(each[0].tensors) for each in answers]


def noting(cut: Callable[..., tuple[Tensor, int]], parts: list[int]) -> Callable[..., tuple[Tensor, int]]:
    """Note how many programs share a block."""

    def note(*given: Any) -> tuple[Tensor, int]:
        blocks, places = cut(*given)
        parts.extend(each[4] for each in blocks.tolist() if each[1])
        return blocks, places

    return note


# Gemma 2's soft cap and window are in test_engine_steps.py, and its grouped heads are a Qwen3's.
@pytest.mark.in_ci(when=lambda at: at.family != "gemma2")
@pytest.mark.parametrize("family", ["gpt", "qwen3", "deepseek", "gemma2", "llama4", "bloom", "qwen3_5"])
@torch.inference_mode()
def test_mixed_steps_give_what_whole_prompts_give(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_checkpoint(AgreementArguments(layers=2, hidden=128, vocab=50), family, tmp_path / "1-gpu")
    weights = load_weights(tmp_path / "1-gpu", config, 1, choose_precision("fp32", CPU), CPU)
    shape = CacheShape(weights.decoder.entries, torch.float32)

    def steps() -> Steps:
        network = Network(config, weights)
        own = replace(shape, is_head_major=network.ops.is_head_major)
        states = poisoned_states(network, 8) if config.keeps_states else None
        return Steps(network, KvCache(own, CPU, 1 << 24, 128, states=states))

    expected = answers_of(steps(), 0)
    fake_gpu(monkeypatch)
    launch_few_programs(monkeypatch)
    for name, fewer in (("ROWS", (4,)), ("TOKENS", (8,)), ("_INPUT_TOKENS", (4,)), ("CONTINUED_TOKENS", (8,))):
        monkeypatch.setattr(warmup, name, fewer)  # the interpreter takes its time
    monkeypatch.setattr(warmup, "MIXED_TOKENS", (5,))
    monkeypatch.setattr(graphs, "_MIXED_CONTEXTS", 1)
    monkeypatch.setattr(chunks, "TUNING", replace(TUNING, short_prompt_budgets=0))
    by_kernels, mix, captured = steps(), StepGraphs.mix, list[tuple[int, bool]]()
    parts = list[int]()
    monkeypatch.setattr(row_blocks.PackedRows, "cut", noting(row_blocks.PackedRows.cut, parts))
    if family == "qwen3":
        monkeypatch.setattr(grouped_prefill, "Split", lambda: row_blocks.Split(1, 4, 1))

    def note_and_run(own: StepGraphs, rows: NumberedRows, ids: Tensor, positions: Tensor) -> Any:
        found = mix(own, rows, ids, positions)
        captured.append((int(rows.lengths[-1]), found is not None))
        return found

    monkeypatch.setattr(StepGraphs, "mix", note_and_run)
    warmup.warm_up(by_kernels, 600.0, BUDGET)
    room = [by_kernels.mixed_room(rows) for rows in (1, 6, 7)]
    assert room == ([0] * 3 if family == "bloom" else [BUDGET - 1, BUDGET - 6, 0])  # a fourth is of contexts
    found = answers_of(by_kernels, BUDGET)
    # With a bias a context is run whole, before the step of the rows that decode.
    assert captured == ([] if family == "bloom" else [(3, True)] + [(6, True)] * 2 + [(5, True)])
    assert (max(parts, default=1) > 1) == (family == "qwen3")  # programs shared the prompt's cells
    for ours, theirs in zip(found, expected, strict=True):
        assert set(ours) == set(theirs)
        for name, values in theirs.items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(ours[name], values, atol=1e-3)
            else:
                np.testing.assert_array_equal(ours[name], values)


@torch.inference_mode()
def test_contexts_that_join_in_a_captured_step_take_their_first_tokens_from_its_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once; and one whose beams all begin with the same."""
    config = write_checkpoint(AgreementArguments(layers=1, hidden=128, vocab=50), "qwen3", tmp_path / "1-gpu")
    weights = load_weights(tmp_path / "1-gpu", config, 1, choose_precision("fp32", CPU), CPU)
    shape = CacheShape(weights.decoder.entries, torch.float32)

    def answers(steps: Steps, budget: int) -> list[Tensors]:
        scheduler, found = Scheduler(steps, 8, steps_ahead=True, chunk_tokens=budget), list[list[Answer]]()
        for moment in ((5, 3), (2, 4), (3,)):
            for length in moment:
                found.append([])
                line = [token % 50 for token in prompts(length, seed=len(found))[0]]
                tensors = ask([line], 5, end_id=NEVER, is_return_log_probs=True, beam_width=3 - len(moment))
                scheduler.add(Job(parse_request(tensors, steps.config), found[-1].append))
            scheduler.step()
        while not scheduler.is_idle:
            scheduler.step()
        return [dict(each[0].tensors) for each in found]

    def steps() -> Steps:
        network = Network(config, weights)
        return Steps(network, KvCache(replace(shape, is_head_major=network.ops.is_head_major), CPU, 1 << 24, 128))

    expected = answers(steps(), 0)
    fake_gpu(monkeypatch)
    launch_few_programs(monkeypatch)
    for name, fewer in (("ROWS", (4,)), ("TOKENS", (8,)), ("_INPUT_TOKENS", (4,)), ("CONTINUED_TOKENS", (8,))):
        monkeypatch.setattr(warmup, name, fewer)
    monkeypatch.setattr(warmup, "MIXED_TOKENS", ())
    monkeypatch.setattr(graphs, "_MIXED_CONTEXTS", 2)
    by_kernels, mix, following = steps(), Steps.mix, list[int]()

    def note(self: Steps, *given: Any) -> Any:
        found = mix(self, *given)
        following.append(len(found[2][1]))
        return found

    monkeypatch.setattr(Steps, "mix", note)
    warmup.warm_up(by_kernels, 600.0, BUDGET)
    found = answers(by_kernels, BUDGET)
    assert following == [2, 1]
    for ours, theirs in zip(found, expected, strict=True):
        for name, values in theirs.items():
            np.testing.assert_allclose(ours[name], values, atol=1e-3, err_msg=name)
