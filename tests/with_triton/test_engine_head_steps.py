"""Steps of a model with an EAGLE-3 head, and of the head, by the kernels in Triton's interpreter and by torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines.faked_gpu import launch_few_programs
from support.tiny_models.eagle_heads import save_with_head
from torch import Tensor

from backends.fastertransformer.engine import loading
from backends.fastertransformer.engine.arrays import upload
from backends.fastertransformer.engine.model.predictor import Predictor
from backends.fastertransformer.engine.ops.triton_ops import TritonOps
from backends.fastertransformer.engine.settings import Settings

CPU = torch.device("cpu")


@torch.inference_mode()
def test_kernels_keep_and_draft_what_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_head(tmp_path, tmp_path / "draft", norm_before_residual=True)
    expected = take_all(tmp_path, by_kernels=False)
    monkeypatch.setattr(loading, "choose_ops", TritonOps)
    launch_few_programs(monkeypatch)
    found = take_all(tmp_path, by_kernels=True)
    assert len(found) == len(expected) == 7
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= (0 if ours.dtype == torch.long else 1e-4)


def take_all(folder: Path, by_kernels: bool) -> list[Tensor]:
    """Begin two rows, go on by a token of each; the head runs these, and drafts: what is kept, and said each time."""
    steps, _ = loading.load_steps(
        Settings(folder, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22, speculation="eagle3")
    )
    drafting, random = steps.drafting, np.random.default_rng(1)
    assert drafting and isinstance(drafting.network, Predictor)
    assert {isinstance(each.network.ops, TritonOps) for each in (steps, drafting)} == {by_kernels}
    counts, begin = np.array([7, 3]), np.zeros(2, np.int64)
    ids, rows = random.integers(3, 120, (2, 8)), [steps.cache.allocator.take(16) for _ in counts]
    for each in (steps, drafting):
        each.slots.allocate(0, rows, counts + 4)
    steps.extend(np.concatenate((ids[0, :7], ids[1, :3])), begin, counts, 0)
    steps.slots.set_tokens(0, torch.from_numpy(ids[[0, 1], counts]))
    found = [steps.decode(2)[0].clone()]
    found += [steps.cache.kept(slice(0, 2), torch.from_numpy(counts - past)).clone() for past in (0, 1)]
    hidden = drafting.extend(np.concatenate((ids[0, 1:8], ids[1, 1:4])), begin, counts, 0)[
        upload(np.cumsum(counts) - 1, CPU)
    ]
    drafting.network.carry(hidden, drafting.cache, slice(0, 2), upload(counts, CPU))
    logits, tokens = drafting.predictions.argmax(hidden)
    drafting.slots.set_tokens(0, tokens)
    found += [logits.clone(), drafting.network.said(tokens)]
    logits, tokens = drafting.decode(2)
    return [*found, logits.clone(), drafting.network.said(tokens).clone()]
