"""Experts of MXFP4: the engine over such directories, against transformers with what it makes of their bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.engines.asking import CPU
from support.engines.hub_served import check_served, opened
from support.engines.network_runs import FP32, load_for_kernels, open_network, prefill_logits, some_ids
from support.tiny_models.llama_models import save
from support.tiny_models.quantized_models import save_mxfp4, save_state
from transformers import AutoModelForCausalLM, Mxfp4Config

from backends.fastertransformer.engine.errors import WeightsError
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import Precision
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.parallel.partition import Partition
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from ft_format.weight_format import INT8

_INTO = "model.layers.1.mlp.experts.gate_up_proj"


def oracle(directory: Path) -> Any:
    """Have transformers dequantize the experts, to bf16 as it does."""
    given = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    how = Mxfp4Config(dequantize=True)  # type: ignore[no-untyped-call]
    return AutoModelForCausalLM.from_pretrained(directory, quantization_config=how, **given).float().eval()


@pytest.mark.parametrize(
    ("ranks", "is_whole"),
    [(1, False), pytest.param(2, False, marks=pytest.mark.long), pytest.param(2, True, marks=pytest.mark.long)],
)
def test_experts_are_served_as_transformers_dequantizes_them(ranks: int, is_whole: bool, tmp_path: Path) -> None:
    """Alone, and by ranks that share each expert or have some of them whole."""
    model = oracle(save_mxfp4(tmp_path))
    engine = opened(tmp_path, ranks, has_expert_parallel=is_whole)
    check_served(engine, model)
    engine.close()


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_gpu_keeps_them_as_they_are(rank: int | None, tmp_path: Path) -> None:
    """As many bytes as the files have; logits are those of the directory that convert makes of it, in bf16."""
    model = oracle(save_mxfp4(tmp_path / "mxfp4"))
    config = read_config(tmp_path / "mxfp4", "Llama", 1 if rank is None else 2)
    weights = load_for_kernels(tmp_path / "mxfp4", config, 2, rank)
    assert weights.decoder
    block: Any = weights.decoder.layers[1].feed_forward
    into, out = block.experts.into, block.experts.out
    assert into.weight.dtype == into.scales.dtype == out.weight.dtype == torch.uint8 and into.is_packed
    assert into.inputs == 64 and out.inputs == (64 if rank is None else 32)
    for expert in range(4):
        experts = model.model.layers[1].mlp.experts
        first, last = experts.gate_up_proj[expert].T, experts.down_proj[expert].T  # [out, in]
        gate, up = first[::2], first[1::2]
        if rank is not None:
            gate, up, last = gate.chunk(2)[rank], up.chunk(2)[rank], last.chunk(2, 1)[rank]
        for matrices, expected in ((into, torch.cat((gate, up))), (out, last)):
            bias = 0 if matrices.bias is None else matrices.bias[expert]
            assert torch.equal(matrices.multiply(expert, torch.eye(expected.shape[1])), expected.T + bias)
    if rank is None:
        files = load_file(tmp_path / "mxfp4/model.safetensors")
        biases = files[f"{_INTO}_bias"].numel() * 4
        assert into.size_bytes == files[f"{_INTO}_blocks"].nbytes + files[f"{_INTO}_scales"].nbytes + biases
        convert(ConvertArguments(tmp_path / "mxfp4", tmp_path / "bf16", 1, "bf16", format="huggingface"))
        ids = some_ids(2, 9)
        plain, packed = open_network(tmp_path / "bf16", 1, "Llama"), Network(config, weights)
        assert torch.equal(
            prefill_logits(open_network(tmp_path / "mxfp4", 1, "Llama"), ids), prefill_logits(plain, ids)
        )
        expected = model(ids).logits
        assert (prefill_logits(packed, ids) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_type_is_rounded_to_once(tmp_path: Path) -> None:
    """fp16 on a CPU: each product is rounded to it, and computed with in fp32; some are below its least number."""
    save_mxfp4(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state[f"{_INTO}_scales"][:, :9] = 102
    save_state(tmp_path, state, {"quant_method": "mxfp4"})
    weights = load_weights(
        tmp_path, read_config(tmp_path, "Llama"), 1, Precision(torch.float16, torch.float32, ""), CPU
    )
    assert weights.decoder
    block: Any = weights.decoder.layers[1].feed_forward
    gate_up = oracle(tmp_path).model.layers[1].mlp.experts.gate_up_proj[2].half().float()
    expected = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1)
    bias = state[f"{_INTO}_bias"][2].half().float()
    found = block.experts.into.multiply(2, torch.eye(64)) - torch.cat((bias[::2], bias[1::2]))
    assert (found - expected).abs().max() < 1e-6 and (expected.abs() < 2**-24).any()


def refusal(directory: Path, ranks: int = 1, **precision: Any) -> str:
    config = read_config(directory, "Llama", ranks)
    with pytest.raises(WeightsError) as refused:
        part = Partition(range(2), 0 if ranks > 1 else None)
        load_weights(directory, config, ranks, replace(FP32, **precision), CPU, part)
    return str(refused.value)


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    assert "4 ranks cannot share experts of MXFP4 in groups of 32 of a middle of 64" in refusal(tmp_path, 4)
    assert "int8_mode with weights of MXFP4, which are served as they are stored" in refusal(tmp_path, weights=INT8)
    assert "fp8_activations = 1, and no matrix is FP8" in refusal(tmp_path, rounds_activations=True)
    state, said = load_file(tmp_path / "model.safetensors"), {"quant_method": "mxfp4"}
    save_state(tmp_path, {**state, f"{_INTO}_scales": state[f"{_INTO}_scales"][:, :, :1].contiguous()}, said)
    found = refusal(tmp_path)
    assert f"{_INTO}: missing" in found and f"{_INTO}_blocks: the model that config.json describes has none" in found
    save_state(tmp_path, {**state, f"{_INTO}_blocks": state[f"{_INTO}_blocks"][:, :9].contiguous(),
        f"{_INTO}_scales": state[f"{_INTO}_scales"][:, :9].contiguous()}, said)  # fmt: skip
    assert f"{_INTO}: [4, 64, 9], expected [4, 64, 128]" in refusal(tmp_path)
    save_state(tmp_path, state, None)
    assert f"{_INTO}_blocks: the model that config.json describes has none" in refusal(tmp_path)


def test_made_up_numbers_are_mxfp4_as_the_description_says(tmp_path: Path) -> None:
    save("gpt_oss", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"quantization_config": {"quant_method": "mxfp4"}}))
    weights = load_weights(tmp_path, read_config(tmp_path, "Llama"), 1, FP32, CPU, are_made_up=True)
    assert weights.decoder
    block: Any = weights.decoder.layers[0].feed_forward
    found = block.experts.into.multiply(0, torch.eye(64))
    assert 0.01 < found.std() < 0.04 and len((found * 2**8).round().unique()) < 120
