"""Qwen3-Next and Qwen3.5 in the forms of Megatron: bytes and logits of transformers' model."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints.core_delta_rule import (
    arguments,
    arrays,
    with_predictor,
    write_bridge,
    write_bridge_of_images,
    write_megatron_lm_fsdp,
    write_ranks,
)
from support.checkpoints.hybrid_models import hybrid, write_hub
from support.checkpoints.llama_files import megatron_lm_dist
from support.tiny_models.llama_models import Saved, build, logits, tensors
from support.tiny_models.same_model import assert_same_model
from transformers import AutoModelForCausalLM

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

FP32, BF16 = torch.float32, torch.bfloat16
FORMS: dict[str, Callable[..., Path]] = {
    "Megatron-LM, torch_dist": megatron_lm_dist(arguments, arrays),
    "Megatron-LM, fsdp_dtensor": write_megatron_lm_fsdp,
    "Megatron-LM": write_ranks,
    "Megatron-Bridge": write_bridge,
    "Megatron-Bridge, fsdp_dtensor": partial(write_bridge, is_fsdp=True),
    "Megatron-Bridge, of images": write_bridge_of_images,
}


@pytest.mark.parametrize(
    ("name", "form", "ranks", "dtype"),
    [
        ("qwen3_next", "Megatron-LM, torch_dist", 2, FP32),
        ("qwen3_next", "Megatron-LM", 1, FP32),
        ("qwen3_next", "Megatron-LM", 2, BF16),
        ("qwen3_5", "Megatron-LM", 2, FP32),
        ("qwen3_next", "Megatron-Bridge", 1, FP32),
        ("qwen3_next", "Megatron-Bridge", 2, BF16),
        ("qwen3_5", "Megatron-LM, torch_dist", 2, FP32),
        ("qwen3_next", "Megatron-LM, fsdp_dtensor", 3, BF16),
        ("qwen3_next", "Megatron-Bridge, fsdp_dtensor", 2, FP32),
        ("qwen3_5", "Megatron-Bridge", 2, BF16),
        ("qwen3_5", "Megatron-Bridge, of images", 1, FP32),
        ("qwen3_5_moe", "Megatron-Bridge, of images", 2, BF16),
    ],
)
def test_the_same_model_comes_out(name: str, form: str, ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    source, out = hybrid(name, dtype), tmp_path / "out"
    path = FORMS[form](tmp_path / "run", source, ranks)
    convert(ConvertArguments(path, out, weight_data_type="fp32" if dtype == FP32 else "bf16", format="huggingface"))
    assert_same_model(out, source)


@pytest.mark.parametrize(
    ("name", "form"), [("qwen3_next", "Megatron-Bridge"), ("qwen3_5", "Megatron-LM"), ("qwen3_5_moe", "of images")]
)
def test_a_predictor_becomes_that_of_the_hubs_files(name: str, form: str, tmp_path: Path) -> None:
    """Which transformers' class passes over when it loads them; the third layer has attention."""
    model = build(name, num_hidden_layers=3)
    model.save_pretrained(tmp_path / "hub")
    source = Saved(model.config, with_predictor(tensors(tmp_path / "hub"), 2), logits(model))
    write = write_bridge_of_images if form == "of images" else FORMS[form]
    said = {"mtp_num_layers": 2, "mtp_use_repeated_layer": True} if form == "of images" else {"mtp_num_layers": 1}
    path, out = write(tmp_path / "run", source, 2, **said), tmp_path / "out"
    convert(ConvertArguments(path, out, weight_data_type="fp32", format="huggingface"))
    assert_same_model(out, source)
    about = json.loads((out / "config.json").read_text())
    assert about["num_nextn_predict_layers" if name == "qwen3_next" else "mtp_num_hidden_layers"] == 1
    convert(ConvertArguments(out, tmp_path / "again", weight_data_type="fp32", format="huggingface"))
    assert tensors(tmp_path / "again").keys() == source.tensors.keys()


def test_a_mixture_that_no_class_names_becomes_qwen3_next_which_computes_the_same(tmp_path: Path) -> None:
    source, out = hybrid("qwen3_5_moe"), tmp_path / "out"
    run = write_bridge(tmp_path / "run", source, 1)
    convert(ConvertArguments(run, out, weight_data_type="fp32", format="huggingface"))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=FP32, attn_implementation="eager").eval()
    assert type(model).__name__ == "Qwen3NextForCausalLM"
    assert np.abs(logits(model) - source.logits).max() < 1e-5


def test_a_directory_of_the_hub_is_read_and_predictors_are_written_as_they_are(tmp_path: Path) -> None:
    """The hub's Qwen3-Next has layers ``mtp.*`` beside the model; transformers' class ignores them when it loads."""
    from safetensors.torch import save_file

    source = hybrid("qwen3_next")
    hub = write_hub(tmp_path / "hub", source)
    more = {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.gate.weight": torch.ones(4, 64)}
    save_file({**source.tensors, **more}, hub / "model.safetensors", {"format": "pt"})
    opened = open_source(find_archive(hub), for_shards=False)
    assert [said for said in opened.remarks if said.startswith("2 tensors are written as they are, such as mtp.")]
    convert(ConvertArguments(hub, tmp_path / "out", weight_data_type="bf16", format="huggingface"))
    made = tensors(tmp_path / "out")
    assert made.keys() == {*source.tensors, *more}
    assert {key.rpartition(".")[2] for key, value in made.items() if value.dtype == FP32} == {"A_log", "dt_bias"}
    assert all(torch.equal(made[key], value.to(made[key].dtype)) for key, value in source.tensors.items())
    convert(ConvertArguments(hub, tmp_path / "fp8", weight_data_type="bf16", format="huggingface", quantization="fp8"))
    stays = json.loads((tmp_path / "fp8/config.json").read_text())["quantization_config"]["ignore"]
    assert {"mtp.fc", "mtp.layers.0.mlp.gate", "lm_head"} <= {*stays}
    with pytest.raises(CheckpointError, match=r"delta = DeltaRule"):
        convert(ConvertArguments(hub, tmp_path / "shards", weight_data_type="fp32"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experimental_attention_variant": "gdn2"}, "experimental_attention_variant: gdn2"),
        ({"experimental_attention_variant": None}, "attention_output_gate: True"),
        ({"linear_attention_freq": [1, 0]}, r"linear_attention_freq: \[1, 0\]"),
        ({"linear_attention_freq": 2}, "has no source|does not have"),
        ({"attention_output_gate": False}, r"linear_qkv\.weight .* instead of \[4, 2, 16, 64\]"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads: 3  .no multiple of linear_num_key_heads 2"),
        ({"activation_func": {"_target_": "torch.nn.functional.gelu", "_call_": False}}, "activation: gated gelu"),
        ({"mtp_num_layers": 1}, "mtp_num_layers: 1  .its layer is as the last, which has no attention"),
        ({"mtp_num_layers": 2}, "mtp_num_layers: 2  .there is one beside the layers"),
    ],
)
def test_what_no_block_computes_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_bridge(tmp_path / "run", hybrid("qwen3_next"), 1, **changes)
    with pytest.raises(CheckpointError, match=words):
        convert(ConvertArguments(path, tmp_path / "out", weight_data_type="fp32", format="huggingface"))
    assert not (tmp_path / "out").exists()


def test_rank_files_of_other_sizes_than_the_arguments_say_are_refused(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "run", hybrid("qwen3_next"), 2, linear_key_head_dim=16)
    with pytest.raises(
        CheckpointError, match=r"in_proj\.weight has the shape \[44, 64\], and 60 rows are a rank's of 2"
    ):
        open_source(find_archive(path), for_shards=False)
