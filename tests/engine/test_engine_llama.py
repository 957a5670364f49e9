"""The Llama family's network against transformers, over shards of what FasterTransformer computes and directories."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines.network_runs import CPU, FP32, decode_logits, mixed_logits, open_network, prefill_logits
from support.shards.llama_shards import WITH_SHARDS, served_of
from support.tiny_models.llama_models import VOCAB
from torch import Tensor

from backends.fastertransformer.engine.errors import WeightsError
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import Precision
from backends.fastertransformer.engine.model.weights import load_weights
from ft_format.weight_format import INT8

TOLERANCE = 1e-4
WINDOWED = ["mistral", "gemma2", "starcoder2"]
LONGEST = 20


def ids_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    expected: Tensor = model(ids).logits
    return expected


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, ranks) for name in WITH_SHARDS for ranks in (1, 2, 4)), *((name, 1) for name in WINDOWED)],
)
def test_a_network_gives_transformers_logits(name: str, ranks: int, tmp_path: Path) -> None:
    """The inputs are longer than the windows of 5; all at once, one at a time, and rows cut anywhere."""
    root, model = served_of(name, tmp_path, ranks)
    network, ids = open_network(root, ranks, "Llama"), ids_of(3, LONGEST)
    expected = logits_of(model, ids)
    assert expected.std() > 0.1  # the weights are such that it matters
    assert (prefill_logits(network, ids)[..., :VOCAB] - expected).abs().max() < TOLERANCE
    assert (decode_logits(network, ids, 7)[..., :VOCAB] - expected[:, 7:]).abs().max() < TOLERANCE
    cuts = [[4, 5, 17], [1, 11, 12], [6, 7, 19]]
    for row, logits in enumerate(mixed_logits(network, ids, cuts)):
        assert (logits[:, :VOCAB] - expected[row, : cuts[row][-1] + 1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "llama_linear", "llama31", "llama32", "nemotron", "mistral"])
def test_rotary_angles_are_transformers_up_to_the_last_position(name: str, tmp_path: Path) -> None:
    root, model = served_of(name, tmp_path, 1)
    for spec in open_network(root, 1, "Llama")._specs.values():
        assert spec.rotary
        torch.testing.assert_close(spec.rotary.inverse_frequencies, model.model.rotary_emb.inv_freq, rtol=3e-7, atol=0)


@pytest.mark.parametrize("name", ["llama31", "gemma2"])
def test_int8_logits_stay_near_those_of_the_full_weights(name: str, tmp_path: Path) -> None:
    root, _ = served_of(name, tmp_path, 2)
    config, ids = read_config(root, "Llama"), ids_of(4, LONGEST)
    full, rounded = (
        prefill_logits(Network(config, load_weights(root, config, 2, precision, CPU)), ids)
        for precision in (FP32, replace(FP32, weights=INT8))
    )
    assert 1e-5 < (rounded - full).abs().max() / full.std() < 0.1  # it is another network, and nearly the same


def test_half_precision_is_as_near_as_transformers_own(tmp_path: Path) -> None:
    """bf16 on a processor that multiplies it, or in fp32: no further from fp32 than transformers' bf16 is."""
    root, model = served_of("gemma2", tmp_path, 1)
    config, ids = read_config(root, "Llama"), ids_of(4, LONGEST)
    expected = logits_of(model, ids)
    precision = Precision(torch.bfloat16, torch.bfloat16, "")
    found = prefill_logits(Network(config, load_weights(root, config, 1, precision, CPU)), ids)[..., :VOCAB]
    theirs = logits_of(model.bfloat16(), ids).float()
    assert (found - expected).norm() < 1.2 * (theirs - expected).norm()


def test_ranks_that_do_not_divide_the_key_heads_are_refused(tmp_path: Path) -> None:
    root, _ = served_of("llama", tmp_path, 1)
    ini = root / "config.ini"
    ini.write_text(ini.read_text().replace("tensor_para_size = 1", ""))
    config = read_config(root, "Llama")
    words = (
        "8 does not divide head_num = 8, kv_head_num = 4 and inter_size = 96; each rank .*copy.*--tensor-para-size=8"
    )
    with pytest.raises(WeightsError, match=words):
        load_weights(root, config, 8, FP32, CPU)
    with pytest.raises(WeightsError, match="3 does not divide head_num = 8, kv_head_num = 4 and inter_size = 96$"):
        load_weights(root, config, 3, FP32, CPU)
