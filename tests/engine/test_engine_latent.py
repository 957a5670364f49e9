"""Latent attention in the engine: DeepSeek V2 and V3, what has V3's class, and GLM-4.7-Flash, against transformers."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines.asking import ask, generated
from support.engines.few_pages import Served, spoiled
from support.engines.hub_served import check_served, opened
from support.engines.network_runs import decode_logits, mixed_logits, open_network, prefill_logits
from support.engines.paged_steps import paged_steps
from support.tiny_models.greedy import NEVER, argmaxes
from support.tiny_models.llama_models import VOCAB, save
from support.tiny_models.quantized_models import deepseeks, save_state, to_fp8

from backends.fastertransformer.engine.errors import WeightsError
from backends.fastertransformer.engine.model import weights
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.ops.fp8 import Fp8Linear
from backends.fastertransformer.engine.scheduling.chunks import Chunks
from backends.fastertransformer.engine.settings import Settings
from backends.fastertransformer.engine.steps.steps import Steps

ENTRY = 8 + 24  # what is rotated of a key, and the latent vector
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("deepseek_v3", {}),
    "moonlight": ("moonlight", {}),
    "deepseek_v2": ("deepseek_v2", {}),
    "glm": ("glm4_moe_lite", {}),
    "halves": ("deepseek_v3", {"rope_interleave": False}),
    "factor": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 0.4, "mscale_all_dim": 1.0}}),
    "factor_alone": ("deepseek_v2", {"rope_parameters": YARN}),
    "biases": ("deepseek_v3", {"attention_bias": True}),
    "biases_of_some": ("moonlight", {"attention_bias": True}),
    "wide_values": ("glm4_moe_lite", {"v_head_dim": 28, "q_lora_rank": None}),
    "dense": ("deepseek_v2", {"first_k_dense_replace": 3}),
}


def saved(case: str, directory: Path, **changes: Any) -> Any:
    name, own = CASES[case]
    return save(name, directory, **{**own, **changes})


@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers_however_the_tokens_come(case: str, tmp_path: Path) -> None:
    """New rows whole, which attend in the plain form; one token at a time, and in chunks, in the absorbed form."""
    model = saved(case, tmp_path)
    network = open_network(tmp_path, 1, "Llama")
    ids = torch.randint(3, VOCAB, (2, 45), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(ids).logits
    assert (prefill_logits(network, ids) - expected).abs().max() < 1e-4
    assert (decode_logits(network, ids, 3) - expected[:, 3:]).abs().max() < 1e-4
    for found, row in zip(mixed_logits(network, ids, [[5, 36, 37], [9, 10, 44]]), expected, strict=True):
        assert (found - row[: len(found)]).abs().max() < 1e-4


@pytest.mark.parametrize(("case", "ranks", "stages"), [("glm", 1, 1), ("deepseek_v3", 2, 1), ("deepseek_v2", 1, 2)])
def test_a_server_gives_transformers_tokens_and_log_probabilities(
    case: str, ranks: int, stages: int, tmp_path: Path
) -> None:
    """Ranks share the heads, and each keeps the whole latent vector; stages keep those of their layers."""
    model = saved(case, tmp_path)
    engine = opened(tmp_path, ranks, stages)
    layers = 3 if stages == 1 else 2
    shape = engine._steps.cache.shape
    assert shape.token_bytes == layers * ENTRY * 4 and f"({layers * ENTRY * 4} bytes a token)" in engine.description
    assert engine._steps.network.weights.decoder.layers[0].attention.up.matrix.shape == (8 // ranks, 12 + 10, 24)
    check_served(engine, model, longest=50)
    engine.close()


def test_what_a_chunk_costs_counts_the_absorbed_form(tmp_path: Path) -> None:
    """A token's product with a cell takes one number of the entry for each of the query, and one for what comes out."""
    model = saved("deepseek_v3", tmp_path)
    products, with_cell = read_config(tmp_path, "Llama").attention_work
    own = model.model.layers[0].self_attn.named_parameters()
    assert products == sum(each.numel() for name, each in own if "norm" not in name)
    assert with_cell == 8 * (ENTRY + 24)


def test_rows_share_pages_and_are_set_back(tmp_path: Path) -> None:
    """Prompts that begin alike find each other's pages, and too few pages preempt rows."""
    model = saved("deepseek_v3", tmp_path, max_position_embeddings=512)
    steps = paged_steps(Settings(tmp_path, 1, 1, "fp32", 1, "Llama", kv_cache_bytes=1 << 22), 14)
    served = Served(steps, chunk_tokens=40)
    draw = np.random.default_rng(2)
    shared = draw.integers(3, VOCAB, 70).tolist()
    lines = [[*shared, *draw.integers(3, VOCAB, 20 + 9 * each).tolist()] for each in range(5)]
    with spoiled(steps):
        answers = [served.submit(ask([line], 60, end_id=NEVER)) for line in lines]
        served.run()
        for line, (answer,) in zip(lines, answers, strict=True):
            found = generated(answer.tensors)
            assert len(found) == 60 and found == argmaxes(model, line, found)
    assert served.allocator.prefixes.found >= 64 and served.most_used == 14
    assert served.scheduler.metrics.preemptions > 0


def test_predictors_of_further_tokens_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Transformers passes over them too: files have them or not, and a log says so; other layers are refused."""
    model = saved("deepseek_v3", tmp_path, num_nextn_predict_layers=1)
    path, ids = tmp_path / "model.safetensors", torch.arange(3, 15)[None]
    with torch.no_grad():
        expected = model(ids).logits
    tensors = load_file(path)
    for more in ({}, {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}):
        save_file({**tensors, **more}, path)
        with caplog.at_level(logging.INFO):
            assert (prefill_logits(open_network(tmp_path, 1, "Llama"), ids) - expected).abs().max() < 1e-4
        assert "layers that predict further tokens are read for speculation = mtp alone" in caplog.text
        caplog.clear()
    save_file({**tensors, "model.layers.4.eh_proj.weight": torch.ones(64, 128)}, path)
    with pytest.raises(WeightsError, match="model.layers.4.eh_proj.weight: the model .* has none"):
        open_network(tmp_path, 1, "Llama")


@pytest.mark.parametrize("is_kept", [False, True])
def test_matrices_of_fp8_are_those_that_their_scales_say(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks, as DeepSeek's; what is multiplied to queries has its scales in it, whether others are kept or not."""
    model = saved("deepseek_v3", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for key in [key for key in state if "self_attn" in key and "_proj" in key]:
        numbers, scales = to_fp8(state[key], 16, 32)
        wide = scales.repeat_interleave(16, 0).repeat_interleave(32, 1)
        model.get_parameter(key).data = numbers.float() * wide[: numbers.shape[0], : numbers.shape[1]]
        state[key], state[f"{key}_scale_inv"] = numbers, scales
    save_state(tmp_path, state, deepseeks([16, 32]))
    if is_kept:
        rooms = iter([0])
        monkeypatch.setattr(weights, "free_bytes", lambda device: next(rooms, 1 << 40))
    network, ids = open_network(tmp_path, 1, "Llama"), torch.arange(3, 40)[None]
    layer = network.weights.decoder.layers[0].attention
    assert [isinstance(each, Fp8Linear) for each in (layer.down, layer.query_up, layer.out)] == [is_kept] * 3
    with torch.no_grad():
        expected = model(ids).logits
    assert (prefill_logits(network, ids) - expected).abs().max() < 1e-4
    assert (decode_logits(network, ids, 30) - expected[:, 30:]).abs().max() < 1e-4


def test_int8_weights_leave_what_is_multiplied_to_queries_as_it_is(tmp_path: Path) -> None:
    model = saved("dense", tmp_path)
    engine = opened(tmp_path, int8_mode=1)
    layer = engine._steps.network.weights.decoder.layers[0].attention
    assert layer.down.weight.dtype == layer.out.weight.dtype == torch.int8
    exact = model.model.layers[0].self_attn.kv_b_proj.weight.view(8, 22, 24)
    assert torch.equal(layer.up.matrix, exact)
    line = list(range(3, 60))
    (outputs,) = engine.generate([engine.parse(ask([line], 4, is_return_context_log_probs=True, end_id=NEVER))])
    with torch.no_grad():
        known = model(torch.tensor([line])).logits[0, :-1].log_softmax(-1)
    expected = known.gather(1, torch.tensor(line)[1:, None])[:, 0].numpy()
    assert np.abs(outputs["context_log_probs"][0, 1 : len(line)] - expected).max() < 0.5
    engine.close()


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 256), ("cuda", 1024)])
def test_chunks_are_larger_on_a_gpu_where_each_makes_keys_of_what_is_cached(
    device: str, tokens: int, tmp_path: Path
) -> None:
    saved("deepseek_v3", tmp_path)
    steps = SimpleNamespace(device=torch.device(device), config=read_config(tmp_path, "Llama", 1))
    assert Chunks(cast(Steps, steps), 256)._budget_after(0) == tokens
