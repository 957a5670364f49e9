"""FP8 whose activations are rounded by scales in the files, against transformers that is given what is rounded so.

``tests/with_compressed_tensors`` has what the library of such directories computes itself.
"""

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
from support.engines.network_runs import FP32, load_for_kernels, prefill_logits, some_ids
from support.tiny_models.llama_models import save
from support.tiny_models.quantized_models import (
    LEFT_OUT,
    MIXTURE,
    STATIC,
    save_fp8,
    save_state,
    save_static,
    static,
    to_fp8,
)
from support.tiny_models.statically import model_of
from torch import Tensor

from backends.fastertransformer.engine.errors import WeightsError
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.network import Network
from backends.fastertransformer.engine.model.weights import load_weights
from backends.fastertransformer.engine.ops.fp8 import StaticLinear
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert

_UP = "model.layers.0.mlp.up_proj"


def by_hand(x: Tensor, scale: Tensor) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize(
    ("method", "ranks"), [*((each, 1) for each in STATIC), pytest.param("fp8", 2, marks=pytest.mark.long)]
)
def test_activations_are_rounded_by_the_scales_of_the_files(method: str, ranks: int, tmp_path: Path) -> None:
    """Of each matrix by its own, where those of query, key and value differ too."""
    state = save_static(tmp_path / "fp8", method)
    model, plain = (model_of(tmp_path / "fp8", state, STATIC[method], each) for each in (by_hand, None))
    ids = some_ids(1, 12)
    assert (model(ids).logits - plain(ids).logits).abs().max() > 1e-2
    served = tmp_path / "fp8"
    if method == "compressed-tensors":  # a conversion to the format that it has keeps the scales
        served = tmp_path / "kept"
        convert(ConvertArguments(tmp_path / "fp8", served, 1, "bf16", format="huggingface", quantization="fp8"))
    engine = opened(served, ranks)
    check_served(engine, model)
    engine.close()


@pytest.mark.parametrize("method", ["compressed-tensors", pytest.param("fp8", marks=pytest.mark.long)])
def test_each_expert_rounds_by_its_own(method: str, tmp_path: Path) -> None:
    state = save_static(tmp_path / "fp8", method, MIXTURE)
    engine = opened(tmp_path / "fp8")
    check_served(engine, model_of(tmp_path / "fp8", state, STATIC[method], by_hand))
    engine.close()
    with pytest.raises(WeightsError, match="gate_proj.weight and other experts have scales for their inputs"):
        load_for_kernels(tmp_path / "fp8", read_config(tmp_path / "fp8", "Llama"))


def test_what_stays_fp8_rounds_as_well(tmp_path: Path) -> None:
    """As matrices are kept on a GPU, and made-up ones."""
    state = save_static(tmp_path, "modelopt")
    config = read_config(tmp_path, "Llama")
    weights, ids = load_for_kernels(tmp_path, config), some_ids(2, 9)
    expected = model_of(tmp_path, state, STATIC["modelopt"], by_hand)(ids).logits
    assert (prefill_logits(Network(config, weights), ids) - expected).abs().max() < 1e-4 * expected.abs().max()
    made_up = load_weights(tmp_path, config, 1, FP32, CPU, are_made_up=True)
    assert made_up.decoder
    found: Any = made_up.decoder.layers[0]
    assert all(isinstance(each, StaticLinear) for each in (found.attention.qkv, found.feed_forward.out))


def refusal(directory: Path, **precision: Any) -> str:
    with pytest.raises(WeightsError) as refused:
        load_weights(directory, read_config(directory, "Llama"), 1, replace(FP32, **precision), CPU)
    return str(refused.value)


def test_scales_that_cannot_be_followed_are_refused_by_name(tmp_path: Path) -> None:
    state = save_static(tmp_path, "compressed-tensors")
    said = static("compressed-tensors")
    assert "fp8_activations = 1, and the files have scales by which these are rounded" in refusal(
        tmp_path, rounds_activations=True
    )
    for value in (0.0, -1.0, float("nan")):
        save_state(tmp_path, {**state, f"{_UP}.input_scale": torch.tensor(value)}, said)
        assert f"the scale of the input of {_UP}.weight is {value}, and no positive number" in refusal(tmp_path)
    save_state(tmp_path, {**state, f"{_UP}.input_scale": torch.ones(2)}, said)
    found = refusal(tmp_path)
    assert f"{_UP}.weight: config.json says that its input has a scale, and one number beside it is none" in found
    assert f"{_UP}.input_scale: the model that config.json describes has none" in found
    inputs = said["config_groups"]["group_0"]["input_activations"]
    save_state(tmp_path, state, {**said, "kv_cache_scheme": None})
    assert "self_attn.k_scale: the model that config.json describes has none" in refusal(tmp_path)
    for change, words in (
        ({"strategy": "channel"}, "strategy: channel  (a static scale is one for all activations)"),
        ({"num_bits": 4}, "input_activations.num_bits: 4"),
        ({"type": "int"}, "input_activations.type: int  (whole numbers are not read)"),
    ):
        group = {**said["config_groups"]["group_0"], "input_activations": {**inputs, **change}}
        save_state(tmp_path, state, {**said, "config_groups": {"group_0": group}})
        assert words in refusal(tmp_path)
    about = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": LEFT_OUT}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(about))
    save_state(tmp_path, state, None)
    load_weights(tmp_path, read_config(tmp_path, "Llama"), 1, FP32, CPU)
    save_state(tmp_path, state, {"quant_method": "fp8", "activation_scheme": "whichever"})
    assert "activation_scheme: whichever" in refusal(tmp_path)


def test_keys_that_become_part_of_other_matrices_are_refused(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.kv_b_proj"
    state[f"{name}.weight"], state[f"{name}.weight_scale"] = to_fp8(state[f"{name}.weight"], 1 << 10, 1 << 10)
    save_state(tmp_path, {**state, f"{name}.input_scale": torch.ones(())}, static("AutoFP8"))
    assert f"{name}.weight is not multiplied with what config.json says has a scale" in refusal(tmp_path)


def test_a_bound_of_dynamic_scales_is_passed_over(tmp_path: Path) -> None:
    """Meta's directories have one for each matrix: activations that have no scale are not rounded here."""
    state = save_fp8(tmp_path, None, (1, 0), "_scale")
    said = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": LEFT_OUT}
    save_state(tmp_path, {**state, f"{_UP}.input_scale_ub": torch.tensor([1200.0])}, said)
    load_weights(tmp_path, read_config(tmp_path, "Llama"), 1, FP32, CPU)
