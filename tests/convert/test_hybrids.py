"""Nemotron-H in every form of Megatron: bytes and logits of transformers' model; Mamba 2 is cut section by section."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.hybrid_models import (
    arguments,
    arrays,
    hybrid,
    predictor,
    with_predictor,
    write_bridge,
    write_hub,
    write_megatron_lm_fsdp,
    write_ranks,
)
from support.checkpoints.llama_files import megatron_lm_dist
from support.tiny_models.llama_models import tensors
from support.tiny_models.same_model import assert_same_model

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.formats import find_archive, open_source
from export_scripts.convert import convert
from handover.errors import CheckpointError

FP32, BF16 = torch.float32, torch.bfloat16
FORMS: dict[str, Callable[..., Path]] = {
    "Megatron-LM": write_ranks,
    "Megatron-LM, older": partial(write_ranks, is_old=True),
    "Megatron-LM, two stages": partial(write_ranks, stages=2),
    "Megatron-LM, two expert ranks": partial(write_ranks, experts=2),
    "Megatron-LM, torch_dist": megatron_lm_dist(arguments, arrays),
    "Megatron-LM, fsdp_dtensor": write_megatron_lm_fsdp,
    "Megatron-Bridge": write_bridge,
    "Megatron-Bridge, fsdp_dtensor": partial(write_bridge, is_fsdp=True),
}


@pytest.mark.parametrize(
    ("name", "form", "ranks", "dtype"),
    [
        ("nemotron_h", "Megatron-LM", 1, FP32),
        ("nemotron_h", "Megatron-LM, older", 2, BF16),
        ("nemotron_h", "Megatron-LM, torch_dist", 2, FP32),
        ("nemotron_h", "Megatron-Bridge", 1, BF16),
        ("nemotron3", "Megatron-LM, two stages", 2, FP32),
        ("nemotron3", "Megatron-LM, torch_dist", 1, BF16),
        ("nemotron3", "Megatron-Bridge", 2, FP32),
        ("nemotron3", "Megatron-LM, two expert ranks", 1, BF16),
        ("nemotron3_latent", "Megatron-LM", 2, BF16),
        ("nemotron3_latent", "Megatron-LM, two expert ranks", 2, FP32),
        ("nemotron3_latent", "Megatron-Bridge", 2, FP32),
        ("nemotron_h", "Megatron-LM, fsdp_dtensor", 3, FP32),
        ("nemotron3", "Megatron-Bridge, fsdp_dtensor", 2, BF16),
    ],
)
def test_the_same_model_comes_out(name: str, form: str, ranks: int, dtype: torch.dtype, tmp_path: Path) -> None:
    source, out = hybrid(name, dtype), tmp_path / "out"
    path = FORMS[form](tmp_path / "run", source, ranks)
    convert(ConvertArguments(path, out, weight_data_type="fp32" if dtype == FP32 else "bf16", format="huggingface"))
    assert_same_model(out, source)


def test_a_directory_of_the_hub_is_read_and_what_each_head_has_stays_fp32(tmp_path: Path) -> None:
    source = hybrid("nemotron3_latent")
    path = write_bridge(tmp_path / "run", source, 1)
    convert(ConvertArguments(path, tmp_path / "one", weight_data_type="fp32", format="huggingface"))
    convert(ConvertArguments(tmp_path / "one", tmp_path / "two", weight_data_type="bf16", format="huggingface"))
    made = tensors(tmp_path / "two")
    kept = {key for key, value in made.items() if value.dtype == FP32}
    assert {key.rpartition(".")[2] for key in kept} == {"A_log", "D", "dt_bias", "e_score_correction_bias"}
    assert all(torch.equal(made[key], value.to(made[key].dtype)) for key, value in source.tensors.items())


def test_sections_in_the_order_of_the_ranks_are_refused(tmp_path: Path) -> None:
    path = write_megatron_lm_fsdp(tmp_path / "run", hybrid("nemotron_h"), 2, tensor_model_parallel_size=2)
    with pytest.raises(CheckpointError, match=r"mixer\..* holds its sections in the order of the ranks"):
        open_source(find_archive(path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hybrid_layer_pattern": "M*MG"}, r"hybrid_layer_pattern: G  \(layers are M, \*, -, E\)"),
        ({"hybrid_layer_pattern": "M*M"}, r"num_layers: 4  \(hybrid_layer_pattern has 3\)"),
        ({"hybrid_layer_pattern": "M*ME"}, "num_moe_experts: None"),
        ({"hybrid_layer_pattern": None}, "hybrid_layer_pattern must say which block each layer is"),
        ({"hybrid_override_pattern": "MMMM"}, "hybrid_override_pattern: MMMM  .beside another"),
        ({"position_embedding_type": "learned_absolute"}, "position_embedding_type: learned_absolute"),
        ({"position_embedding_type": "rope"}, "rotated  .its attention has no positions"),
        ({"layernorm_epsilon": 1e-6}, r"mamba.norm_eps: 1e-05  \(the other norms add 1e-06\)"),
        ({"qk_layernorm": True}, r"q_norm\.weight  \[16\]  has no source"),
        ({"window_size": [4, 0]}, "layers.window"),
        ({"hybrid_stack_spec": {"_target_": "megatron.core.x.gated_delta_product_stack_spec"}}, "gated_delta_product"),
        ({"mamba_num_heads": 4}, "does not fit|instead of"),
    ],
)
def test_what_no_block_computes_is_refused_by_name(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_bridge(tmp_path / "run", hybrid("nemotron_h"), 1, **changes)
    with pytest.raises(CheckpointError, match=words):
        convert(ConvertArguments(path, tmp_path / "out", weight_data_type="fp32", format="huggingface"))
    assert not (tmp_path / "out").exists()


_BLOCK = "M*E"


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        (write_bridge, {"hybrid_layer_pattern": f"ME*E/{_BLOCK}"}),
        (write_bridge, {"mtp_num_layers": 2, "mtp_use_repeated_layer": True, "mtp_hybrid_override_pattern": _BLOCK}),
        (write_ranks, {"hybrid_layer_pattern": f"ME*E/{_BLOCK}"}),
    ],
)
def test_a_predictor_becomes_that_of_the_hubs_files(
    form: Callable[..., Path], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Which transformers' class passes over when it loads them."""
    plain, out = hybrid("nemotron3"), tmp_path / "out"
    source = replace(plain, tensors=with_predictor(plain, _BLOCK))
    path = form(tmp_path / "run", source, 2, **changes)
    convert(ConvertArguments(path, out, weight_data_type="fp32", format="huggingface"))
    assert_same_model(out, source)
    about = json.loads((out / "config.json").read_text())
    assert (about["num_nextn_predict_layers"], about["mtp_hybrid_override_pattern"]) == (1, _BLOCK)


@pytest.mark.parametrize(
    "changes", [{"hybrid_layer_pattern": "ME*E/M*/*M"}, {"mtp_num_layers": 1, "mtp_use_repeated_layer": True}]
)
def test_predictors_of_a_training_are_left_out_and_named(changes: dict[str, Any], tmp_path: Path) -> None:
    source, out = hybrid("nemotron3"), tmp_path / "out"
    path = write_bridge(tmp_path / "run", source, 1, more=predictor(source), **changes)
    remarks = open_source(find_archive(path), for_shards=False).remarks
    assert [said for said in remarks if said.startswith("2 tensors are left out, such as mtp.layers.0.")]
    convert(ConvertArguments(path, out, weight_data_type="fp32", format="huggingface"))
    assert_same_model(out, source)


def test_a_rank_without_its_rows_is_named(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "run", hybrid("nemotron_h"), 2, mamba_state_dim=8)
    with pytest.raises(CheckpointError, match=r"mixer\.\w+ has the shape .* rows are a rank's of 2"):
        open_source(find_archive(path), for_shards=False)


def test_layers_that_transformers_passes_over_are_written_and_named(tmp_path: Path) -> None:
    """The hub's Nemotron 3 has layers ``mtp.*`` beside the model; its class ignores them when it loads."""
    from safetensors.torch import save_file

    source = hybrid("nemotron3")
    hub = write_hub(tmp_path / "hub", source)
    more = {"mtp.layers.0.eh_proj.weight": torch.ones(64, 128), "mtp.layers.1.mixer.gate.weight": torch.ones(4, 64)}
    more["mtp.layers.1.mixer.gate.e_score_correction_bias"] = torch.full((4,), 0.1)
    save_file({**source.tensors, **more}, hub / "model.safetensors", {"format": "pt"})
    about = json.loads((hub / "config.json").read_text())
    (hub / "config.json").write_text(json.dumps({**about, "num_nextn_predict_layers": 1}))
    opened = open_source(find_archive(hub), for_shards=False)
    assert [
        said for said in opened.remarks if said.startswith("3 tensors are written as they are, such as mtp.layers.")
    ]
    convert(ConvertArguments(hub, tmp_path / "out", weight_data_type="bf16", format="huggingface"))
    made = tensors(tmp_path / "out")
    assert made.keys() == {*source.tensors, *more}
    assert {name: str(made[name].dtype) for name in more} == {
        name: "torch.float32" if name.endswith("_bias") else "torch.bfloat16" for name in more
    }
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 1
