"""Mixtures of experts: the engine over Hugging Face directories, against transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines.asking import CPU
from support.engines.hub_served import check_served, opened
from support.engines.network_runs import FP32, load_for_kernels
from support.tiny_models.llama_models import build, save
from torch import Tensor
from torch.ao.quantization.observer import PerChannelMinMaxObserver

from backends.fastertransformer.engine.errors import WeightsError
from backends.fastertransformer.engine.model.blocks.mixture import MixtureWeights
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops.linear import Linear
from backends.fastertransformer.engine.ops.routing import Router, choose
from backends.fastertransformer.engine.parallel.partition import Partition
from ft_format.weight_format import INT8, NONE
from models.described import read_directory

FAMILIES = [
    *("mixtral", "qwen3_moe", "qwen3_moe_alike", "olmoe", "glm4_moe", "glm4_moe_air", "minimax_m2"),
    *("ernie4_5_moe", "exaone_moe", "gpt_oss"),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_server_gives_transformers_tokens_and_log_probabilities(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    engine = opened(tmp_path)
    check_served(engine, model)
    engine.close()


@pytest.mark.parametrize(
    ("name", "ranks"), [("qwen3_moe", 2), ("gpt_oss", 2), pytest.param("glm4_moe", 4, marks=pytest.mark.long)]
)
def test_ranks_that_have_experts_whole_serve_what_transformers_computes(name: str, ranks: int, tmp_path: Path) -> None:
    """Experts apart, in arrays with biases that one rank of each adds, and beside what every token uses."""
    model = save(name, tmp_path)
    engine = opened(tmp_path, ranks, has_expert_parallel=True)
    check_served(engine, model)
    engine.close()


def test_each_rank_reads_its_experts_whole(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    config = replace(read_config(tmp_path, "Llama", 2), has_expert_parallel=True)
    weights = load_for_kernels(tmp_path, config, 2, 1)
    assert weights.decoder
    layer = weights.decoder.layers[1].feed_forward
    assert isinstance(layer, MixtureWeights) and layer.experts.first == 2
    for matrices, names in ((layer.experts.into, ("w1", "w3")), (layer.experts.out, ("w2",))):
        place = "model.layers.1.block_sparse_moe.experts"
        own = [torch.cat([files[f"{place}.{n}.{name}.weight"] for name in names]) for n in (2, 3)]
        assert matrices.weight is not None and torch.equal(matrices.weight, torch.stack(own))


def test_experts_that_ranks_cannot_have_whole_are_refused(tmp_path: Path) -> None:
    save("mixtral", tmp_path, num_local_experts=3)
    config = replace(read_config(tmp_path, "Llama", 2), has_expert_parallel=True)
    with pytest.raises(WeightsError, match="enable_expert_parallel = 1, and 2 ranks cannot share 3 experts"):
        load_weights(tmp_path, config, 2, FP32, CPU, Partition(range(3), 0))
    save("llama", tmp_path / "dense")
    config = replace(read_config(tmp_path / "dense", "Llama", 2), has_expert_parallel=True)
    with pytest.raises(WeightsError, match="enable_expert_parallel = 1, and the model has no experts"):
        load_weights(tmp_path / "dense", config, 2, FP32, CPU, Partition(range(3), 0))


def test_predictors_of_further_tokens_are_passed_over(tmp_path: Path) -> None:
    """As transformers passes over them: their tensors are in the files, and nothing depends on them."""
    model = save("glm4_moe", tmp_path)
    path, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_nextn_predict_layers": 1}))
    tensors = load_file(file)
    for name, tensor in read_directory(tmp_path, WeightsError).decoder.tensors().items():
        tensors.setdefault(name, torch.full(tensor.shape, torch.nan))
    assert sum(each.isnan().any().item() for each in tensors.values()) > 20
    save_file(tensors, file, {"format": "pt"})
    engine = opened(tmp_path)
    check_served(engine, model)
    engine.close()


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_experts_lie_in_one_tensor_where_they_are_not_packed(rank: int | None, tmp_path: Path) -> None:
    """Each rank has its slice of every expert's middle, the gate's before what it multiplies; all bytes are counted."""
    save("mixtral", tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    config = read_config(tmp_path, "Llama", 1 if rank is None else 4)
    weights = load_for_kernels(tmp_path, config, 4, rank)
    assert weights.decoder
    layer = weights.decoder.layers[1].feed_forward
    assert isinstance(layer, MixtureWeights)

    def of_rank(name: str, axis: int) -> Tensor:
        every = [files[f"model.layers.1.block_sparse_moe.experts.{n}.{name}.weight"] for n in range(4)]
        stacked = torch.stack(every)
        return stacked if rank is None else stacked.chunk(4, axis)[rank]

    into = torch.cat((of_rank("w1", 1), of_rank("w3", 1)), 1)
    assert layer.experts.into.weight is not None and layer.experts.out.weight is not None
    assert torch.equal(layer.experts.into.weight, into)
    assert torch.equal(layer.experts.out.weight, of_rank("w2", 2))
    assert layer.experts.into.size_bytes == into.nbytes
    if rank is None:
        assert weights.size_bytes == sum(each.nbytes for each in files.values())


@pytest.mark.parametrize(("name", "rank"), [("mixtral", None), ("mixtral", 1), ("gpt_oss", None)])
def test_experts_become_int8_on_a_cpu(name: str, rank: int | None, tmp_path: Path) -> None:
    """By output channel, as torch's observer of channels has it; a router stays; memory is a quarter of fp32's."""
    save(name, tmp_path)
    config, part = read_config(tmp_path, "Llama", 1 if rank is None else 2), Partition(range(2), rank)
    both = [load_weights(tmp_path, config, 2, replace(FP32, weights=each), CPU, part) for each in (NONE, INT8)]
    plain, small = (each.decoder.layers[1].feed_forward for each in both if each.decoder)
    assert isinstance(plain, MixtureWeights) and isinstance(small, MixtureWeights)
    assert torch.equal(plain.router.linear(torch.eye(64)), small.router.linear(torch.eye(64)))
    for full, packed in ((plain.experts.into, small.experts.into), (plain.experts.out, small.experts.out)):
        assert packed.size_bytes < 0.3 * full.size_bytes
        for one, other in zip(full.packed, packed.packed, strict=True):
            unit = torch.eye(one.weight.shape[1])
            bias = 0 if one.bias is None else one.bias
            matrix = (one(unit) - bias).T.contiguous()
            observer = PerChannelMinMaxObserver(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)
            observer(matrix)
            scales = observer.max_val.maximum(-observer.min_val) / 127
            expected = torch.fake_quantize_per_channel_affine(
                matrix, scales, torch.zeros(len(scales), dtype=torch.int32), 0, -127, 127
            )
            found = (other(unit) - bias).T
            # rows whose quotient is half way between two steps, and inputs of bytes, may differ
            assert (found - expected).abs().max() < 1.01 * scales.max()
            assert ((found - expected).abs() > 1e-4 * scales[:, None] * 127).float().mean() < 0.01
    assert both[0].size_bytes - both[1].size_bytes == both[1].saved_bytes


def test_int8_on_a_gpu_and_ranks_that_cannot_share_experts_are_refused(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path)
    config = read_config(tmp_path, "Llama")
    with pytest.raises(WeightsError, match="int8 experts are multiplied by a CPU alone: leave int8_mode out"):
        load_for_kernels(tmp_path, config, precision=replace(FP32, weights=INT8))
    save("qwen3_moe", tmp_path, moe_intermediate_size=42)
    with pytest.raises(WeightsError, match="4 ranks cannot share 8 heads, .* and a middle of 96 and 42"):
        load_weights(tmp_path, read_config(tmp_path, "Llama", 4), 4, FP32, CPU, Partition(range(3), 0))


@pytest.mark.parametrize("is_group_of_two", [True, False])
def test_groups_are_chosen_as_deepseek_does(is_group_of_two: bool) -> None:
    """V2 takes a group's best expert, V3 its two best: both of transformers' routers."""
    name = "deepseek_v3" if is_group_of_two else "deepseek_v2"
    sizes = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 5, "n_shared_experts": 1}
    ways = {} if is_group_of_two else {"topk_method": "group_limited_greedy"}
    model = build(name, **sizes, **ways)
    block = model.model.layers[2].mlp
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((60, 64), np.float32))
    _, counts, chosen = block.gate(x)
    bias = block.gate.e_score_correction_bias if is_group_of_two else None
    linear = Linear(block.gate.weight.data)
    scale = model.config.routed_scaling_factor
    router = Router(linear, 5, is_group_of_two, bias, is_group_of_two, scale, 4, 2, is_group_of_two)
    ours, own = choose(router, linear(x))
    found = torch.zeros(60, 16).scatter(1, ours, own)
    expected = torch.zeros(60, 16).scatter(1, chosen, counts.detach())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    free = choose(replace(router, groups=1, groups_used=1), linear(x))[0]
    assert (free.sort()[0] != ours.sort()[0]).any()
