"""The steps as a GPU takes them, after the real warming up, against the same by torch: by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines.faked_gpu import fake_gpu, launch_few_programs
from support.engines.network_runs import load_for_kernels
from support.engines.paged_steps import poisoned_states
from torch import Tensor

from backends.fastertransformer.engine.cache.kv_cache import KvCache
from backends.fastertransformer.engine.cache.sizing import CacheShape
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import choose_precision
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops.packed_rows import NumberedRows
from backends.fastertransformer.engine.steps import warmup
from backends.fastertransformer.engine.steps.graphs import StepGraphs
from backends.fastertransformer.engine.steps.steps import Steps
from benchmarks.gpu.agreement import AgreementArguments, write_checkpoint

CPU = torch.device("cpu")


def take_all(steps: Steps) -> list[Tensor]:
    """Begin rows, go on with some tokens of each, decode; rows leave and others come: what follows each time.

    Where layers keep states, rows run drafts too, some of which were right.

    The first rows fit into a graph and the second, one of which has two blocks of queries, do not.
    """
    vocab_size, random, found = steps.config.vocab_size, np.random.default_rng(1), list[Tensor]()
    for lengths in ([3, 1, 3], [20, 2]):
        counts, nothing = np.array(lengths), np.full(len(lengths), -1)
        source = counts + 2 if steps.config.encoder else np.zeros_like(counts)
        allocator = steps.cache.allocator
        rows = [allocator.take(length + 9, source=each) for length, each in zip(lengths, source.tolist(), strict=True)]
        steps.slots.allocate(0, rows, counts + 2)
        if steps.config.encoder:
            encoded, _ = steps.encode(random.integers(0, vocab_size, source.sum()), source, nothing, 0)
            found.append(encoded.clone())
        ids = random.integers(0, vocab_size, counts.sum())
        found.append(steps.extend(ids, np.zeros_like(counts), counts, 0).clone())
        ids = random.integers(0, vocab_size, 2 * len(lengths))
        hidden = steps.extend(ids, counts, np.full_like(counts, 2), 0).view(len(lengths), 2, -1)[:, -1].clone()
        logits, tokens = steps.predictions.argmax(hidden)
        found.append(logits.clone())
        steps.slots.set_tokens(0, tokens)
        for _ in range(2):
            logits, tokens = steps.decode(len(lengths))
            found += [logits.clone(), tokens.clone()]
        if steps.cache.states:
            starts, (drafted, right) = counts + 4, np.array([[4, 1, 3], [2, 1, 3]])[:, : len(lengths)]
            drafted[0] += 2 * (counts[0] > 3)  # no graph has as many
            found.append(steps.verify(random.integers(0, vocab_size, drafted.sum()), starts, drafted).clone())
            steps.settle(right)
            steps.slots.resume(random.integers(0, vocab_size, len(lengths)), starts + right)
            found.append(steps.decode(len(lengths))[0].clone())
        steps.slots.free(len(lengths), 0, counts[:0], counts[:0])
        allocator.release(rows)
    return found


# A GPT's, a Qwen3.5's, DeepSeek's and a Llama 4's are in the mixed steps. A GPT-J's are a GPT's but for rotations by
# pairs, which the kernels' own tests make, and a Qwen3's are GLM's.
LONG = ("gpt", "gptj", "qwen3", "qwen3_5", "deepseek", "llama4")


@pytest.mark.in_ci(when=lambda at: at.family not in LONG)
@pytest.mark.parametrize("family", ["bloom", "t5", "gemma2", "glm4_moe", "falcon_h1", *LONG])
@torch.inference_mode()
def test_steps_give_what_torch_gives(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_checkpoint(AgreementArguments(layers=2, hidden=128, vocab=50), family, tmp_path / "1-gpu")
    root = tmp_path / "1-gpu"
    if config.has_experts:
        weights = load_for_kernels(root, config)
    else:
        weights = load_weights(root, config, 1, choose_precision("fp32", CPU), CPU)
    shape = CacheShape(weights.decoder.entries, torch.float32, has_cross=config.encoder is not None)

    def steps() -> Steps:
        network = Network(config, weights)
        own = replace(shape, is_head_major=network.ops.is_head_major)
        states = poisoned_states(network, 8) if config.keeps_states else None
        return Steps(network, KvCache(own, CPU, 1 << 24, 128, states=states))

    expected = take_all(steps())
    fake_gpu(monkeypatch)
    launch_few_programs(monkeypatch)
    # The interpreter takes its time: one family chooses among sizes.
    has_more = family in ("bloom", "gpt")
    for name, fewer in (
        ("ROWS", (1, 4) if has_more else (4,)),
        ("TOKENS", (4, 8) if has_more else (8,)),
        ("_INPUT_TOKENS", (4,)),
        ("CONTINUED_TOKENS", (4, 8) if has_more else (8,)),
        ("_CONTINUED", 8),
    ):
        monkeypatch.setattr(warmup, name, fewer)
    by_kernels, run, captured = steps(), StepGraphs.extend, list[bool]()

    def note_and_run(step_graphs: StepGraphs, rows: NumberedRows) -> Tensor | None:
        hidden = run(step_graphs, rows)
        captured.append(hidden is not None)
        return hidden

    monkeypatch.setattr(StepGraphs, "extend", note_and_run)
    assert warmup.warm_up(by_kernels).startswith("steps of up to 4 rows and inputs of up to 8 tokens captured")
    found = take_all(by_kernels)
    assert len(found) == len(expected)
    # Rows were continued by graphs, but for a decoder with an encoder, and where attention has a bias.
    assert bool(captured) == (config.encoder is None)
    assert set(captured) <= {by_kernels.network.can_capture_continued}
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        # Gemma 2's logits reach 60, of which fp32 keeps the seventh digit.
        limit = 0 if ours.dtype == torch.long else 1e-4 + 2e-6 * float(theirs.abs().max())
        assert (ours - theirs).abs().max() <= limit
