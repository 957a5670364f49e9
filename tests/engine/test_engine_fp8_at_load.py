"""Weights that become FP8 when they are loaded, beside the directory that a conversion with this quantization writes.

What that directory's bytes are is compared with torch and compressed-tensors where it is written.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines.asking import CPU
from support.engines.hub_served import opened
from support.engines.network_runs import FP32, load_for_kernels, prefill_logits, some_ids
from support.tiny_models.llama_models import MODELS, save
from support.tiny_models.quantized_models import save_case, to_fp8
from torch import Tensor

from backends.fastertransformer.engine.errors import WeightsError
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops import fp8
from backends.fastertransformer.engine.ops.fp8 import quantized
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from models.fp8 import FORMS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROPE = {"rope_type": "default", "rope_theta": 1e4}
# Parts of a tensor that begin within a block; blocks that ranks divide; experts.
PARTED: dict[str, dict[str, Any]] = {
    "phi3_plain": {"hidden_size": 144, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 160},
    "qwen3_moe": {"hidden_size": 144, "moe_intermediate_size": 160},
}
ARRAYS = "gpt_oss", "llama4"  # of whose experts a conversion makes no FP8 either


def converted(directory: Path, quantization: str, data_type: str) -> Path:
    given = {"format": "huggingface", "quantization": quantization}
    convert(ConvertArguments(directory, directory.parent / "fp8", 1, data_type, **given))
    return directory.parent / "fp8"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block", [(1, 300), (128, 128)])
def test_numbers_are_those_that_torch_rounds_to(
    block: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of zeros have a scale; what is computed at once does not matter; smaller blocks end both axes."""
    torch.manual_seed(1)
    weight = (torch.randn(280, 300) * torch.exp2(torch.randint(-9, 3, (280, 1)))).to(dtype)
    weight[7], weight[128:256, :128] = 0, 0
    expected, scales = to_fp8(weight.float(), *block)
    if block[0] == 1:  # its scales have the type of the weights
        scales = scales.to(dtype).float()
        scales[7] = torch.finfo(dtype).eps
        expected = (weight.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    else:
        scales[1, 0] = 1
    for most in (1 << 22, 1 << 10):
        monkeypatch.setattr(fp8, "_MOST_AT_ONCE", most)
        numbers, found = quantized(weight.double().to(DEVICE), dtype, block)
        assert torch.equal(found.cpu(), scales)
        assert torch.equal(numbers.cpu().view(torch.uint8), expected.view(torch.uint8))


def kept(weights: Any, layer: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return numbers and scales of a layer's matrices, by their names."""
    found = weights.decoder.layers[layer]
    parts = {"qkv": found.attention.qkv, "out": found.attention.out}
    block: Any = found.feed_forward
    inner = block.experts if hasattr(block, "experts") else block
    parts |= {name: getattr(inner, name) for name in ("into", "gate", "up", "out") if hasattr(inner, name)}
    return {name: (each.weight, each.scales) for name, each in parts.items() if each is not None}


@pytest.mark.in_ci(when=lambda at: at.rank is not None)
@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("name", PARTED)
def test_numbers_and_scales_are_those_of_the_converted_directory(
    name: str, quantization: str, rank: int | None, tmp_path: Path
) -> None:
    """On a GPU, which keeps both; ranks have their parts of what the whole matrix became."""
    more = {"rope_parameters": ROPE} if name == "phi3_plain" else {}
    save(name, tmp_path / "hub", **PARTED[name], **more, num_hidden_layers=2)
    found = []
    for directory, form in (
        (converted(tmp_path / "hub", quantization, "bf16"), None),
        (tmp_path / "hub", quantization),
    ):
        config = read_config(directory, "Llama", 1 if rank is None else 2)
        precision = replace(FP32, rounded=torch.bfloat16, quantization=form)
        found.append(load_for_kernels(directory, config, 2, rank, precision))
    theirs, ours = (kept(each, 1) for each in found)
    assert len(theirs) >= 4 and all(numbers.dtype == torch.float8_e4m3fn for numbers, _ in ours.values())
    for part, (numbers, scales) in theirs.items():
        assert torch.equal(numbers.view(torch.uint8), ours[part][0].view(torch.uint8)), part
        assert torch.equal(scales, ours[part][1]), part
    assert found[0].size_bytes == found[1].size_bytes


@pytest.mark.in_ci(when=lambda at: (at.name, at.quantization) == ("nemotron_h", "fp8"))
@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(ARRAYS)])
def test_every_family_computes_what_the_converted_directory_does(name: str, quantization: str, tmp_path: Path) -> None:
    """Embedding, head, routers and small tensors of recurrent layers stay in both."""
    save(name, tmp_path / "hub", torch.bfloat16)
    logits = []
    for directory, form in (
        (converted(tmp_path / "hub", quantization, "bf16"), None),
        (tmp_path / "hub", quantization),
    ):
        config = read_config(directory, "Llama")
        precision = replace(FP32, rounded=torch.bfloat16, quantization=form)
        logits.append(
            prefill_logits(Network(config, load_weights(directory, config, 1, precision, CPU)), some_ids(2, 9))
        )
    assert torch.equal(*logits)
    plain = load_weights(tmp_path / "hub", config, 1, replace(FP32, rounded=torch.bfloat16), CPU)
    assert not torch.equal(logits[0], prefill_logits(Network(config, plain), some_ids(2, 9)))


def test_made_up_numbers_become_fp8_too(tmp_path: Path) -> None:
    """Of tensors with a bias of several roles, which have no scales."""
    save("phi3_plain", tmp_path, rope_parameters=ROPE)
    (tmp_path / "model.safetensors").unlink()
    config = read_config(tmp_path, "Llama")
    precision = replace(FP32, quantization="fp8_block", keeps_fp8=True)
    weights = load_weights(tmp_path, config, 1, precision, CPU, are_made_up=True)
    assert weights.decoder
    matrix = weights.decoder.layers[0].attention.out.matrix(torch.float32)
    assert 0.015 < matrix.std() < 0.025 and len(matrix.unique()) < matrix.numel() / 4


def test_what_does_not_become_fp8_is_refused_by_name(tmp_path: Path) -> None:
    save_case("fp8, blocks", tmp_path / "fp8")
    save("gpt_oss", tmp_path / "arrays")
    save("llama", tmp_path / "hub")
    convert(ConvertArguments(tmp_path / "hub", tmp_path / "shards", 1, "fp32"))
    for directory, words in (
        ("fp8", "quantization with weights of FP8, which are served as they are stored"),
        ("shards", "quantization with FasterTransformer's shards, which have int8_mode alone"),
        ("arrays", "quantization with experts in arrays, which are served as they are stored"),
    ):
        with pytest.raises(WeightsError, match=words):
            opened(tmp_path / directory, quantization="fp8")
