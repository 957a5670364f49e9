"""Weights of FP8: the engine over such directories, against transformers over what these weights mean.

What they mean is what transformers and compressed-tensors have loaded of each case, by its recorded digest.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines.asking import CPU, ask
from support.engines.hub_served import check_served, opened
from support.engines.network_runs import FP32, load_for_kernels, prefill_logits, some_ids
from support.tiny_models.dequantized import dequantized
from support.tiny_models.llama_models import save
from support.tiny_models.quantized_models import CASES, LEFT_OUT, compressed, deepseeks, save_case, save_state, to_fp8
from support.tiny_models.quantized_record import RECORD, digest_of
from torch import Tensor

from backends.fastertransformer.engine.errors import EngineError, WeightsError
from backends.fastertransformer.engine.model import weights as loading
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.precision import Precision
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops.fp8 import Fp8Linear, ScaledNumbers
from backends.fastertransformer.engine.ops.linear import Linear
from backends.fastertransformer.engine.ops.ops import Ops
from backends.fastertransformer.engine.parallel.partition import Partition
from benchmarks.gpu.sizes import QUANTIZATIONS
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from ft_format.weight_format import INT8

RECORDED: dict[str, Any] = json.loads(RECORD.read_text())
SCALES = ("_scale_inv", "_scale")


def plain(state: dict[str, Tensor], block: tuple[int, int]) -> dict[str, Tensor]:
    """Multiply numbers by their scales, in fp32; ``block`` 0: all of an axis."""
    found = {key: each.float() for key, each in state.items() if not key.endswith(SCALES)}
    for key in found:
        for scale in (state[key + end].float() for end in SCALES if key + end in state):
            rows, columns = (each or size for each, size in zip(block, found[key].shape, strict=True))
            wide = scale.view(-(-found[key].shape[0] // rows), -1).repeat_interleave(rows, 0)
            wide = wide.repeat_interleave(columns, 1)[: found[key].shape[0], : found[key].shape[1]]
            found[key] = found[key] * wide
    return found


def oracle(directory: Path, state: dict[str, Tensor], beside: Path) -> Any:
    """Have transformers load what a directory's weights mean."""
    import transformers

    beside.mkdir()
    for file in directory.glob("*.json"):
        (beside / file.name).write_bytes(file.read_bytes())
    save_state(beside, {key: each.contiguous() for key, each in state.items()}, None)
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(beside, **given).eval()


def keep_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing fit, until FP8 is kept."""
    rooms = iter([0])
    monkeypatch.setattr(loading, "free_bytes", lambda device: next(rooms, 1 << 40))


def matrices(weights: Any) -> list[Linear]:
    layers = weights.decoder.layers
    return [each for layer in layers for each in (layer.attention.qkv, layer.attention.out, layer.feed_forward.out)]


@pytest.mark.parametrize(
    ("name", "is_kept"),
    [*((name, False) for name in CASES), ("fp8, blocks", True), ("compressed-tensors, channel", True)],
)
def test_a_directory_of_fp8_is_served(
    name: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales of tensors, rows and blocks, whole and cut; some matrices are not FP8; experts are read as fp32."""
    state = save_case(name, tmp_path / "fp8")
    block = CASES[name][1].get("block", (16, 32))
    model = oracle(tmp_path / "fp8", plain(state, block), tmp_path / "plain")
    kept = {key: each for key, each in model.state_dict().items() if key != "lm_head.weight"}
    assert digest_of(kept) == RECORDED[name]["fp32"]
    if is_kept:
        keep_fp8(monkeypatch)
    engine = opened(tmp_path / "fp8")
    linears = [each for each in matrices(engine._steps.network.weights) if each]
    assert any(isinstance(each, Fp8Linear) for each in linears) == is_kept
    check_served(engine, model)
    engine.close()


# Scales of rows are cut as a bias is; blocks have ends of their own.
@pytest.mark.in_ci(when=lambda at: at.quantization == "fp8_block")
@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
def test_what_convert_writes_is_served_by_two_ranks(quantization: str, tmp_path: Path) -> None:
    """Blocks of 128 that no rank's slice ends at; a head of keys and values that both ranks have.

    The same directory that is quantized when it is loaded answers the same to the bit.
    """
    sizes = {"hidden_size": 160, "intermediate_size": 320, "num_key_value_heads": 1, "head_dim": 20}
    save("llama", tmp_path / "hub", torch.bfloat16, **sizes)
    given = {"format": "huggingface", "quantization": quantization}
    convert(ConvertArguments(tmp_path / "hub", tmp_path / "fp8", 1, "fp32", **given))
    found = load_file(tmp_path / "fp8/model.safetensors")
    means = {
        key: dequantized(found, key) if any(key + end in found for end in SCALES) else each.float()
        for key, each in found.items()
        if not key.endswith(SCALES)
    }
    assert sum(each.dtype == torch.float8_e4m3fn for each in found.values()) == 14
    model = oracle(tmp_path / "fp8", means, tmp_path / "plain")
    answers = []
    for directory, form in (("fp8", None), ("hub", quantization)):
        engine = opened(tmp_path / directory, 2, quantization=form)
        check_served(engine, model)
        told = {"is_return_log_probs": True, "is_return_context_log_probs": True}
        answers += engine.generate([engine.parse(ask([list(range(3, 30)), [5]], 8, **told))])
        engine.close()
    for name, found in answers[0].items():
        assert np.array_equal(found, answers[1][name]), name


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_ranks_have_their_parts_of_numbers_and_scales(
    rank: int | None, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Query, key and value in one tensor, gate and up in another: blocks begin and end within parts and slices."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    sizes = {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 2}
    model = save("phi3", tmp_path, rope_parameters=rope, **sizes)
    state = {key: each.clone() for key, each in model.state_dict().items()}
    for key in [key for key in state if "_proj.weight" in key]:
        state[key], state[f"{key}_scale_inv"] = to_fp8(state[key], 40, 56)
    save_state(tmp_path, state, deepseeks([40, 56]))
    means = plain(state, (40, 56))["model.layers.1.self_attn.qkv_proj.weight"]
    out = plain(state, (40, 56))["model.layers.1.self_attn.o_proj.weight"]
    query, key, value = means.split((72, 24, 24))
    if rank is not None:
        query, key, value = (each.chunk(2)[rank] for each in (query, key, value))
        out = out.chunk(2, 1)[rank]
    if is_kept:
        keep_fp8(monkeypatch)
    config = read_config(tmp_path, "Llama", 1 if rank is None else 2)
    weights = load_weights(tmp_path, config, 2, FP32, CPU, Partition(range(2), rank))
    assert weights.decoder
    attention: Any = weights.decoder.layers[1].attention
    unit = torch.eye(72)
    assert torch.equal(attention.qkv(unit), torch.cat((query, key, value)).T)
    assert torch.equal(attention.out(torch.eye(out.shape[1])), out.T)
    assert isinstance(attention.qkv, Fp8Linear) == is_kept
    if is_kept:
        assert attention.qkv.weight.nbytes == (len(query) + len(key) + len(value)) * 72
        assert weights.size_bytes < load_weights(tmp_path, config, 2, FP32, CPU, Partition(range(2), rank)).size_bytes


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_gpu_keeps_experts_as_they_are(rank: int | None, tmp_path: Path) -> None:
    """Blocks end within the ranks' slices of the middle; what these give together is what transformers does."""
    state = save_case("fp8, experts", tmp_path / "fp8")
    means = plain(state, (16, 32))
    model = oracle(tmp_path / "fp8", means, tmp_path / "plain")
    config = read_config(tmp_path / "fp8", "Llama", 1 if rank is None else 2)
    weights = load_for_kernels(tmp_path / "fp8", config, 2, rank)
    assert weights.decoder
    block: Any = weights.decoder.layers[1].feed_forward
    into, out = block.experts.into, block.experts.out
    assert into.weight.dtype == out.weight.dtype == torch.float8_e4m3fn
    assert into.size_bytes == into.weight.nbytes + into.scales.nbytes
    for expert in range(3):
        name = f"model.layers.1.mlp.experts.{expert}"
        gate, up, down = (means[f"{name}.{role}_proj.weight"] for role in ("gate", "up", "down"))
        if rank is not None:
            gate, up, down = gate.chunk(2)[rank], up.chunk(2)[rank], down.chunk(2, 1)[rank]
        assert torch.equal(into.multiply(expert, torch.eye(gate.shape[1])), torch.cat((gate, up)).T)
        assert torch.equal(out.multiply(expert, torch.eye(down.shape[1])), down.T)
    if rank is None:
        ids = some_ids(2, 9)
        expected = model(ids).logits
        assert (prefill_logits(Network(config, weights), ids) - expected).abs().max() < 1e-4 * expected.abs().max()


def test_made_up_numbers_are_fp8_as_the_description_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("phi3", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    (tmp_path / "model.safetensors").unlink()
    said = json.loads((tmp_path / "config.json").read_text())
    for quantization in (each for name, each in QUANTIZATIONS.items() if "fp8" in name):
        (tmp_path / "config.json").write_text(json.dumps(said | {"quantization_config": quantization}))
        keep_fp8(monkeypatch)
        config = read_config(tmp_path, "Llama", 2)
        weights = load_weights(tmp_path, config, 2, FP32, CPU, Partition(range(1), 1), are_made_up=True)
        found = [each for each in matrices(weights) if isinstance(each, Fp8Linear)]
        assert len(found) == 3
        for each in found:
            assert each.scales.unique().tolist() == [pytest.approx(0.02)] and 0.9 < each.weight.float().std() < 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_that_is_kept_gives_what_its_products_give(dtype: torch.dtype) -> None:
    """In each operation that a layer has; rounded once, as a matrix that is stored in the type."""
    torch.manual_seed(0)
    numbers, scales = to_fp8(torch.randn(48, 80), 48, 32)
    scaled = ScaledNumbers(numbers, scales.repeat_interleave(48, 0), 32)
    matrix = plain({"w": numbers, "w_scale": scales}, (48, 32))["w"].to(dtype)
    bias, x, ops = torch.randn(48).to(dtype), torch.randn(3, 80).to(dtype), Ops(CPU)
    kept, full = Fp8Linear(scaled, bias), Linear(matrix, bias)
    assert torch.equal(kept.matrix(dtype), matrix)
    assert kept.size_bytes == 48 * 80 + 48 * 3 * 4 + bias.nbytes
    for found, expected in (
        (ops.linear(kept, x, activation="silu"), ops.linear(full, x, activation="silu")),
        (ops.gated_linear(kept, kept, x, activation="silu"), ops.gated_linear(full, full, x, activation="silu")),
        (ops.partial_linear(kept, x), ops.partial_linear(full, x)),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_rounded_by_token_where_that_is_asked_for(dtype: torch.dtype) -> None:
    """Against both roundings done by hand, in fp64; torch gives the product in bf16."""
    torch.manual_seed(0)
    numbers, scales = to_fp8(torch.randn(48, 80), 1, 80)
    scaled, bias = ScaledNumbers(numbers, scales, 80), torch.randn(48).to(dtype)
    x = (torch.randn(2, 3, 80) * torch.tensor([1e-3, 1.0, 50.0])[:, None]).to(dtype)
    x[0, 0] = 0
    by_token = (x.double().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
    rounded = (x.double() / by_token).float().to(torch.float8_e4m3fn).double() * by_token
    expected = rounded @ (numbers.double() * scales.double()).T + bias.double()
    found = Fp8Linear(scaled, bias, rounds=True)(x)
    assert found.dtype == dtype and found.shape == (2, 3, 48)
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2)
    exact = Fp8Linear(scaled, bias)(x)
    assert 1e-3 < (found - exact).abs().max() / exact.abs().max() < 0.1
    for other in (
        ScaledNumbers(*to_fp8(torch.randn(48, 80), 48, 40), 40),
        ScaledNumbers(numbers[:47], scales[:47], 80),
        ScaledNumbers(*to_fp8(torch.randn(48, 80), 48, 64), 64),
    ):
        grid = other._replace(scales=other.scales.expand(len(other.numbers), -1))
        plainly, asked = (Fp8Linear(grid, None, rounds)(x) for rounds in (False, True))
        assert torch.equal(asked, plainly)


def test_activations_are_rounded_on_a_gpu_alone(tmp_path: Path) -> None:
    save_case("fp8, blocks", tmp_path)
    with pytest.raises(EngineError, match="fp8_activations = 1 needs a GPU of compute capability 8.9 or later"):
        opened(tmp_path, rounds_activations=True)
    save("llama", tmp_path / "plain")
    assert "fp8_activations = 1, and no matrix is FP8" in refusal(tmp_path / "plain", rounds_activations=True)


def refusal(directory: Path, **precision: Any) -> str:
    config = read_config(directory, "Llama")
    with pytest.raises(WeightsError) as refused:
        load_weights(directory, config, 1, replace(FP32, **precision), CPU)
    return str(refused.value)


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    state = save_case("fp8, blocks", tmp_path)
    assert "int8_mode with weights of FP8, which are served as they are stored" in refusal(tmp_path, weights=INT8)
    save_state(tmp_path, state, None)
    assert f"{name}: of type F8_E4M3; legal are" in refusal(tmp_path)
    save_state(tmp_path, state, deepseeks([32, 32]))
    words = "legal are fp32, fp16, bf16, and F8_E4M3 of a layer's matrix with scales for 32 x 32"
    assert f"{name}: of type F8_E4M3; {words}" in refusal(tmp_path)
    save_state(tmp_path, state, {"quant_method": "mxfp4", "modules_to_not_convert": LEFT_OUT})
    assert f"{name}: of type F8_E4M3; legal are fp32, fp16, bf16\n" in refusal(tmp_path)
    save_state(tmp_path, state, {**compressed("channel"), "format": "pack-quantized"})
    assert "format: pack-quantized  (only float-quantized is read)" in refusal(tmp_path)
    static = {**state, f"{name.removesuffix('weight')}input_scale": torch.ones(1)}
    save_state(tmp_path, static, deepseeks([16, 32]))
    assert "mlp.up_proj.input_scale: the model that config.json describes has none" in refusal(tmp_path)
    save_file({**state, name: state[name].to(torch.float8_e5m2)}, tmp_path / "model.safetensors")
    assert f"{name}: of type F8_E5M2" in refusal(tmp_path)


def test_a_type_is_rounded_to_once(tmp_path: Path) -> None:
    """fp16 on a CPU: each product is rounded to it, and computed with in fp32."""
    state = save_case("fp8, blocks", tmp_path)
    config, half = read_config(tmp_path, "Llama"), Precision(torch.float16, torch.float32, "")
    weights = load_weights(tmp_path, config, 1, half, CPU)
    assert weights.decoder
    name = "model.layers.2.self_attn.o_proj.weight"
    expected = plain(state, (16, 32))[name].half().float()
    out: Any = weights.decoder.layers[2].attention.out
    assert torch.equal(out(torch.eye(expected.shape[1])), expected.T)
