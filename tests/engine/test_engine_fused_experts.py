"""Experts that are one array [experts, out, in] in the files: the engine over them, against transformers.

What arrays of FP8 mean is what transformers' own functions dequantize, which also wrote them.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.engines.hub_served import check_served, opened
from support.engines.network_runs import load_for_kernels, prefill_logits, some_ids
from support.tiny_models.llama_models import build
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from backends.fastertransformer.engine.errors import WeightsError
from backends.fastertransformer.engine.model.blocks.mixture import MixtureWeights
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from models.described import find_model_tensors, read_directory

_ARRAYS = ("experts.gate_up_proj", "experts.down_proj")


def save_arrays(folder: Path, state: dict[str, Tensor], config: dict[str, Any], said: dict[str, Any] | None) -> None:
    folder.mkdir(exist_ok=True)
    save_file({key: each.contiguous() for key, each in state.items()}, folder / "model.safetensors")
    given = config if said is None else {**config, "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(given))


def quantized(state: dict[str, Tensor], block: list[int] | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Have transformers quantize the arrays of experts -> what its files have, and what that means."""
    about = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt="float"))
    make, mean = Fp8Quantize(about), Fp8Dequantize(about)
    found, means = dict(state), dict(state)
    for key in [key for key in state if key.endswith(_ARRAYS)]:
        made = make._quantize_one(key, state[key])
        found |= made
        means[key] = mean._dequantize_one(made[key], made[f"{key}_scale_inv"], torch.float32)
    return found, means


def loaded(model: Any, state: dict[str, Tensor]) -> Any:
    model.load_state_dict(state)
    return model.float().eval()


@pytest.mark.parametrize(
    ("name", "suffix"), [("qwen3_moe", ""), pytest.param("glm4_moe", ".weight", marks=pytest.mark.long)]
)
def test_arrays_are_served(name: str, suffix: str, tmp_path: Path) -> None:
    """As they are, and out of the directory that a conversion writes, which has them too."""
    model = build(name)
    state = {key + suffix * key.endswith(_ARRAYS): each for key, each in model.state_dict().items()}
    save_arrays(tmp_path / "arrays", state, model.config.to_dict(), None)
    convert(ConvertArguments(tmp_path / "arrays", tmp_path / "hf", weight_data_type="fp32", format="huggingface"))
    for folder in ("arrays", "hf"):
        engine = opened(tmp_path / folder)
        check_served(engine, model)
        engine.close()


@pytest.mark.parametrize("block", [[16, 8], [8, 16], None])
def test_arrays_of_fp8_are_served(block: list[int] | None, tmp_path: Path) -> None:
    """By blocks, and with one scale for each expert's array; a GPU keeps the numbers, but not of narrow blocks."""
    model = build("qwen3_moe", moe_intermediate_size=48)
    found, means = quantized({key: each.detach() for key, each in model.state_dict().items()}, block)
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    save_arrays(tmp_path, found, model.config.to_dict(), said)
    oracle = loaded(model, means)
    engine = opened(tmp_path)
    check_served(engine, oracle)
    engine.close()
    config = read_config(tmp_path, "Llama")
    weights = load_for_kernels(tmp_path, config)
    assert weights.decoder
    experts: Any = weights.decoder.layers[0].feed_forward
    kept = torch.float32 if block == [16, 8] else torch.float8_e4m3fn
    assert experts.experts.into.weight.dtype == experts.experts.out.weight.dtype == kept
    ids = some_ids(2, 9)
    expected = oracle(ids).logits
    assert (prefill_logits(Network(config, weights), ids) - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_have_their_parts_of_arrays(rank: int, tmp_path: Path) -> None:
    """Blocks end within a rank's slice, narrow ones too; gate and up have scales of their own without a block."""
    model = build("qwen3_moe", moe_intermediate_size=96)
    for number, block in enumerate(([32, 32], [16, 8], None)):
        found, means = quantized({key: each.detach() for key, each in model.state_dict().items()}, block)
        if not block:
            for key in [key for key in found if key.endswith("gate_up_proj_scale_inv")]:
                found[key] = found[key] * torch.tensor([1.0, 2.0])[:, None]
                halves = means[key.removesuffix("_scale_inv")].chunk(2, 1)
                means[key.removesuffix("_scale_inv")] = torch.cat((halves[0], 2 * halves[1]), 1)
        folder = tmp_path / str(number)
        said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
        save_arrays(folder, found, model.config.to_dict(), said)
        weights = load_for_kernels(folder, read_config(folder, "Llama", 2), 2, rank)
        assert weights.decoder and isinstance(mixture := weights.decoder.layers[0].feed_forward, MixtureWeights)
        experts = mixture.experts
        for expert in range(2):
            gate, up = means["model.layers.0.mlp.experts.gate_up_proj"][expert].chunk(2)
            gate, up = gate.chunk(2)[rank], up.chunk(2)[rank]
            down = means["model.layers.0.mlp.experts.down_proj"][expert].chunk(2, 1)[rank]
            unit = torch.eye(gate.shape[1])
            assert torch.equal(experts.into.multiply(expert, unit), torch.cat((gate, up)).T)
            assert torch.equal(experts.out.multiply(expert, torch.eye(down.shape[1])), down.T)


def test_scales_of_the_inputs_of_arrays_are_each_experts(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    found, _ = quantized({key: each.detach() for key, each in model.state_dict().items()}, None)
    count = model.config.num_experts
    for key in [key for key in found if key.endswith(_ARRAYS)]:
        found[f"{key}_activation_scale"] = 0.01 * torch.arange(1, count + 1)
    said = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    save_arrays(tmp_path, found, model.config.to_dict(), said)
    engine = opened(tmp_path)
    experts = engine._steps.network.weights.decoder.layers[0].feed_forward.experts
    for matrices in (experts.into, experts.out):
        for number, each in enumerate(matrices.packed):
            assert [float(scale) for scale, _ in each._parts] == [pytest.approx(0.01 * (number + 1))]
    engine.close()


def test_arrays_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    found, _ = quantized({key: each.detach() for key, each in model.state_dict().items()}, [16, 8])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}
    for change, words in (
        ({name: found[name].transpose(1, 2).contiguous()}, "experts.0.gate_proj.weight: [32, 80], expected [40, 64]"),
        (
            {f"{name}_scale_inv": found[f"{name}_scale_inv"][:, :1].contiguous()},
            "model.layers.0.mlp.experts.0.gate_proj.weight: of type F8_E4M3; legal are",
        ),
    ):
        save_arrays(tmp_path, {**found, **change}, model.config.to_dict(), said)
        decoder = read_directory(tmp_path, WeightsError).decoder
        with pytest.raises(WeightsError) as refused:
            find_model_tensors(tmp_path, decoder, WeightsError)
        assert words in str(refused.value)
