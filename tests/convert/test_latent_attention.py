"""Latent attention and predictors of further tokens: bytes, logits, and what is refused."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import core_latent
from support.checkpoints.core_latent import LAST, with_predictor
from support.checkpoints.llama_configs import megatron_lm, padded_vocabulary
from support.checkpoints.llama_files import chunked, write_megatron_lm, write_megatron_lm_tree, write_torch_dist
from support.checkpoints.llama_sources import Case, write_source
from support.checkpoints.llama_state import State, core_state
from support.tiny_models.llama_models import FP32 as FP32_NAME
from support.tiny_models.llama_models import logits, save, saved, tensors
from support.tiny_models.quantized_models import deepseeks, to_fp8

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from handover.errors import CheckpointError

FP32, BF16 = torch.float32, torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def in_memory(state: State) -> State:
    """The names of rank files."""
    return {key.replace(".transformer_layer.", ".mtp_model_layer."): value for key, value in state.items()}


def converted(path: Path, out: Path, data_type: str = "fp32") -> tuple[State, dict[str, Any]]:
    convert(ConvertArguments(path, out, weight_data_type=data_type, format="huggingface"))
    return tensors(out), json.loads((out / "config.json").read_text())


def assert_same(made: State, expected: State) -> None:
    assert sorted(made) == sorted(expected)
    for key, value in expected.items():
        assert made[key].dtype == value.dtype, key
        assert torch.equal(made[key], value), key


def loaded(root: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(root, dtype=FP32, output_loading_info=True)
    model.set_attn_implementation("eager")
    return model.eval(), loading


@pytest.mark.parametrize(
    ("is_disk", "change", "dtype"),
    [
        (True, lambda state: state, BF16),
        (True, core_latent.local_names, FP32),
        (False, in_memory, FP32),
        (False, lambda state: in_memory(core_latent.fused_down(state)), BF16),
    ],
    ids=["torch_dist", "torch_dist of the local specification", "rank files", "rank files, fused"],
)
def test_predictors_are_written(is_disk: bool, change: Callable[[State], State], dtype: Any, tmp_path: Path) -> None:
    source = saved("deepseek_v3", dtype)
    expected, ranks = with_predictor(source.tensors), 2
    state = core_state(expected, source.config, padded_vocabulary(source.config, ranks))
    arguments = megatron_lm(source.config, (ranks, 1), mtp_num_layers=1)
    if is_disk:
        common = {"args": Namespace(**arguments), "checkpoint_version": 3.0}
        arrays = chunked(change(state), ranks, is_stacked=False)
        write_torch_dist(write_megatron_lm_tree(tmp_path / "run"), arrays, "", common)
    else:
        write_megatron_lm(tmp_path / "run", arguments, change(state), (ranks, 1))
    made, config = converted(tmp_path / "run", tmp_path / "out", "fp32" if dtype == FP32 else "bf16")
    assert_same(made, expected)
    assert config["num_nextn_predict_layers"] == 1
    model, loading = loaded(tmp_path / "out")
    assert all(key.startswith(LAST) for key in loading.pop("unexpected_keys"))
    assert not any(loading.values()), loading
    assert np.abs(logits(model) - source.logits).max() < 1e-5


def write_hub(root: Path, found: State, config: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    root.mkdir(parents=True)
    save_file(found, root / "model.safetensors", {"format": "pt"})
    (root / "config.json").write_text(json.dumps(config))
    return root


def test_a_hub_directory_keeps_its_predictors_and_the_digits_of_its_bias(tmp_path: Path) -> None:
    source = saved("deepseek_v3")
    expected = with_predictor(source.tensors)
    said = {**source.config.to_dict(), "model_type": "kimi_k2", "num_nextn_predict_layers": 1, "auto_map": {"A": "b.C"}}
    made, config = converted(write_hub(tmp_path / "hub", expected, said), tmp_path / "out", "bf16")
    biases = {key for key in expected if key.endswith("e_score_correction_bias")}
    assert_same(made, {key: each if key in biases else each.to(BF16) for key, each in expected.items()})
    assert len(biases) == 3
    assert (config["model_type"], config["num_nextn_predict_layers"]) == ("deepseek_v3", 1)
    assert "auto_map" not in config


def test_predictors_that_a_hub_directory_only_counts_are_not_counted(tmp_path: Path) -> None:
    model = save("deepseek_v3", tmp_path / "hub", num_nextn_predict_layers=1)
    made, config = converted(tmp_path / "hub", tmp_path / "out")
    assert_same(made, tensors(tmp_path / "hub"))
    assert config["num_nextn_predict_layers"] == 0
    assert np.array_equal(logits(loaded(tmp_path / "out")[0]), logits(model))


def test_glm_of_megatron_becomes_the_class_that_computes_it(tmp_path: Path) -> None:
    """Nothing in a training's configuration says that it is GLM-4.7-Flash."""
    case = Case("glm4_moe_lite", "Megatron-LM", 2)
    made, config = converted(write_source(case, tmp_path / "run"), tmp_path / "out")
    assert_same(made, case.source.tensors)
    assert config["model_type"] == "deepseek_v3"
    model, loading = loaded(tmp_path / "out")
    assert not any(loading.values()), loading
    assert np.abs(logits(model) - case.source.logits).max() < 1e-5


REFUSED = [
    ({"qk_layernorm": False}, "qk_layernorm: False"),
    ({"mscale_all_dim": 0.0, "mscale": 0.7}, r"mscale: 0\.7"),
    ({"rope_type": "rope"}, r"mscale_all_dim: 1  \("),
    ({"rope_type": "longrope"}, "rope_type: longrope"),
    ({"rotary_percent": 0.5}, r"rotary_percentage: 0\.5"),
    ({"rotary_interleaved": True}, "rotary_interleaved: True"),
    ({"add_bias_linear": True}, "feed_forward.has_bias: True"),
    ({"mtp_num_layers": 2, "mtp_use_repeated_layer": True}, "mtp_use_repeated_layer: True"),
    ({"moe_router_topk": 1}, r"mixture.is_group_of_two: False  \(deepseek_v3 has True\)"),
    ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant: dsa"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_what_changes_the_function_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    source = saved("deepseek_v3")
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 1))
    run = write_megatron_lm(tmp_path / "run", megatron_lm(source.config, **changes), state)
    with pytest.raises(CheckpointError, match=named):
        converted(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_groups_that_count_two_experts_are_not_those_of_deepseek_v2(tmp_path: Path) -> None:
    """megatron-core adds a group's best ``topk // group_topk`` scores up, transformers' class takes the best."""
    source = saved("deepseek_v2")
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 1))
    changes = {"moe_router_topk": 2, "moe_router_num_groups": 2, "moe_router_group_topk": 1}
    run = write_megatron_lm(tmp_path / "run", megatron_lm(source.config, **changes), state)
    with pytest.raises(CheckpointError, match=r"mixture.is_group_of_two: True  \(a group counts as its best expert\)"):
        converted(run, tmp_path / "out")


def test_a_length_of_before_its_name_is_taken_for_yarns(tmp_path: Path) -> None:
    """Up to megatron-core 0.13 ``max_position_embeddings`` was what YaRN began from."""
    source = saved("deepseek_v3")
    state = core_state(source.tensors, source.config, padded_vocabulary(source.config, 1))
    arguments = megatron_lm(source.config, max_position_embeddings=16)
    del arguments["original_max_position_embeddings"]
    made, config = converted(write_megatron_lm(tmp_path / "run", arguments, state), tmp_path / "out")
    assert config["rope_scaling"]["original_max_position_embeddings"] == 16
    assert config["max_position_embeddings"] == 128
    assert np.abs(logits(loaded(tmp_path / "out")[0]) - source.logits).max() < 1e-5
    assert_same(made, source.tensors)


def test_the_drop_in_engine_and_shards_refuse_it_by_name(tmp_path: Path) -> None:
    save("moonlight", tmp_path / "hub")
    with pytest.raises(CheckpointError, match=r"latent = Latent\(kv_rank=24"):
        convert(ConvertArguments(tmp_path / "hub", tmp_path / "out", weight_data_type="fp32"))


def test_a_directory_in_fp8_becomes_what_transformers_dequantizes(tmp_path: Path) -> None:
    """DeepSeek's own files: blocks of each matrix of the layers, the predictor's too, but for routers and eh_proj."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    source = saved("deepseek_v3", BF16)
    found, expected = with_predictor(source.tensors), {}
    held = dict(found)
    for key, value in found.items():
        expected[key] = value if key.endswith(FP32_NAME) else value.to(BF16)
        if "_proj" in key and "eh_proj" not in key and "mlp.gate." not in key:
            numbers, scales = to_fp8(value.float(), 4, 4)
            held[key], held[f"{key}_scale_inv"] = numbers, scales
            expected[key] = Fp8Dequantize(None)._dequantize_one(numbers, scales, BF16)
    said = {**source.config.to_dict(), "num_nextn_predict_layers": 1, "quantization_config": deepseeks([4, 4])}
    made, config = converted(write_hub(tmp_path / "hub", held, said), tmp_path / "out", "bf16")
    assert_same(made, expected)
    assert "quantization_config" not in config
