"""More tensor-parallel ranks than heads of keys and values, against transformers: each rank has a copy of a head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.engines.asking import CPU, ask, generated
from support.engines.network_runs import decode_logits, open_network, prefill_logits
from support.shards.llama_shards import served_of, shards_of
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB

from backends.fastertransformer.engine.engine import open_engine
from backends.fastertransformer.engine.errors import WeightsError
from backends.fastertransformer.engine.settings import Settings

COUNT = 12


@pytest.mark.parametrize(
    ("name", "kv_heads", "ranks"), [("qwen2", 1, 2), pytest.param("llama", 2, 4, marks=pytest.mark.long)]
)
def test_ranks_give_transformers_log_probabilities_and_tokens(
    name: str, kv_heads: int, ranks: int, tmp_path: Path
) -> None:
    """A process for each rank, joined by gloo; and all of it in one process."""
    root, model = served_of(name, tmp_path, ranks, num_key_value_heads=kv_heads)
    settings = Settings(root, ranks, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22, has_process_per_rank=True)
    lines = [np.random.default_rng(seed).integers(3, VOCAB, length).tolist() for seed, length in enumerate((40, 1, 9))]
    told = {"end_id": NEVER, "runtime_top_p": 1e-7, "is_return_log_probs": True, "is_return_context_log_probs": True}
    engine = open_engine(settings, CPU)
    (outputs,) = engine.generate([engine.parse(ask(lines, COUNT, **told))])
    assert engine._steps.cache.shape.layers[0].head_num == 1
    engine.close()
    for row, line in enumerate(lines):
        found = generated(outputs, row)
        assert len(found) == COUNT and found == argmaxes(model, line, found)
        whole = torch.tensor([*line, *found])
        with torch.no_grad():
            known = model(whole[None]).logits[0, :-1].log_softmax(-1).gather(1, whole[1:, None])[:, 0].numpy()
        assert np.abs(outputs["context_log_probs"][row, 1 : len(line)] - known[: len(line) - 1]).max(initial=0) < 1e-4
        assert np.abs(outputs["output_log_probs"][row, 0] - known[len(line) - 1 :]).max() < 1e-4
    ids = torch.tensor(lines[:1])
    with torch.no_grad():
        expected = model(ids).logits
    network = open_network(root, ranks, "Llama")
    assert (prefill_logits(network, ids)[..., :VOCAB] - expected).abs().max() < 1e-4
    assert (decode_logits(network, ids, 7)[..., :VOCAB] - expected[:, 7:]).abs().max() < 1e-4


def test_shards_for_fewer_ranks_are_refused_with_the_way_out(tmp_path: Path) -> None:
    root, _ = shards_of("llama", tmp_path, 2, num_key_value_heads=2)
    settings = Settings(root, 4, 1, "fp32", 1, "Llama", has_process_per_rank=False)
    words = rf"tensor_para_size = 4, but the shards in {root} were written for 2; cut .* --tensor-para-size=4"
    with pytest.raises(WeightsError, match=words):
        open_engine(settings, CPU)
