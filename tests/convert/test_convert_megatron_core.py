"""megatron-core's keys: NeMo's own files and logits, and what their configurations may say."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.checkpoints.megatron_core import IDS, LOGITS, assert_nemos_logits, core_forward, core_state, cut, run
from support.checkpoints.nemo_archive import HEADS, HIDDEN, POSITIONS, VOCAB, gpt_config, write_nemo
from support.checkpoints.nemo_samples import restore, unpacked
from support.shards.reference_forward import forward

from export_scripts.conversion.plan.check import inspect_source
from handover.errors import CheckpointError


@pytest.mark.parametrize("name", ["gpt_mcore_te_plain.nemo", "gpt_mcore_local_plain.nemo"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_plain_files_compute_nemos_logits(name: str, ranks: int, tmp_path: Path) -> None:
    assert_nemos_logits(run(restore(name, tmp_path), tmp_path / "out", ranks), ranks)


def parallel(state: dict[str, Any], tensor: int, pipeline: int) -> dict[str, dict[str, Any]]:
    """Cut a model as megatron-core does: columns, rows, layers from 0 on each stage, a tied copy on the last."""
    layers = 1 + max(int(key.split(".layers.")[1].split(".")[0]) for key in state if ".layers." in key)
    per_stage, files = layers // pipeline, {}
    for stage in range(pipeline):
        kept = {}
        for key, value in state.items():
            if ".layers." in key:
                layer = int(key.split(".layers.")[1].split(".")[0])
                if layer // per_stage == stage:
                    kept[key.replace(f".layers.{layer}.", f".layers.{layer % per_stage}.")] = value
            elif stage == (0 if ".embedding." in key else pipeline - 1):
                kept[key] = value
        if stage == pipeline - 1 and pipeline > 1:
            kept["model.output_layer.weight"] = state["model.embedding.word_embeddings.weight"]
        for rank in range(tensor):
            part = f"tp_rank_{rank:02d}_pp_rank_{stage:03d}" if pipeline > 1 else f"mp_rank_{rank:02d}"
            files[f"{part}/model_weights.ckpt"] = {key: cut(key, value, tensor, rank) for key, value in kept.items()}
    return files


@pytest.mark.parametrize("name", ["gpt_mcore_te_plain.nemo", "gpt_mcore_local_plain.nemo"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2), (4, 4)])
def test_training_ranks_are_joined(name: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    tree = unpacked(restore(name, tmp_path), tmp_path / "tree")
    with torch.serialization.safe_globals([io.BytesIO]):
        state = torch.load(tree / "model_weights.ckpt", weights_only=True)
    (tree / "model_weights.ckpt").unlink()
    for file, content in parallel(state, tensor, pipeline).items():
        (tree / file).parent.mkdir(exist_ok=True)
        torch.save(content, tree / file)
    config = yaml.safe_load((tree / "model_config.yaml").read_text())
    config |= {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    (tree / "model_config.yaml").write_text(yaml.safe_dump(config))
    assert np.abs(forward(run(tree, tmp_path / "out", 2), IDS) - LOGITS).max() < 1e-4


def assert_same_function(state: dict[str, torch.Tensor], tmp_path: Path, groups: int = HEADS, **config: Any) -> None:
    path = write_nemo(tmp_path / "gpt.nemo", gpt_config(mcore_gpt=True, **config), {"model_weights.ckpt": state})
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, POSITIONS))
    expected = core_forward(state, ids, groups, 1 if config.get("normalization") == "layernorm1p" else 0)
    for ranks in (1, 2):
        assert np.abs(forward(run(path, tmp_path / f"{ranks}", ranks), ids) - expected).max() < 1e-4


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_groups_of_queries_are_expanded_to_full_heads(groups: int, tmp_path: Path) -> None:
    assert_same_function(core_state(groups), tmp_path, groups, num_query_groups=groups)


def test_layernorm1p_stores_its_weights_less_one(tmp_path: Path) -> None:
    assert_same_function(core_state(), tmp_path, normalization="layernorm1p")


def test_missing_biases_are_zeros(tmp_path: Path) -> None:
    assert_same_function(core_state(has_bias=False), tmp_path, bias=False)


def test_an_untied_head_is_kept(tmp_path: Path) -> None:
    state = {**core_state(), "model.output_layer.weight": torch.randn(VOCAB, HIDDEN)}
    assert_same_function(state, tmp_path, share_embeddings_and_output_weights=False)


def test_query_groups_on_training_ranks(tmp_path: Path) -> None:
    state = core_state(2)
    config = gpt_config(mcore_gpt=True, num_query_groups=2, tensor_model_parallel_size=2)
    path = write_nemo(tmp_path / "gpt.nemo", config, parallel(state, 2, 1))
    ids = np.arange(POSITIONS)[None]
    assert np.abs(forward(run(path, tmp_path / "out", 4), ids) - core_forward(state, ids, 2, 0)).max() < 1e-4


def test_query_groups_that_do_not_divide_the_heads(tmp_path: Path) -> None:
    config = gpt_config(mcore_gpt=True, num_query_groups=3)
    path = write_nemo(tmp_path / "gpt.nemo", config, {"model_weights.ckpt": core_state(1)})
    with pytest.raises(CheckpointError, match="num_query_groups 3 does not divide num_attention_heads 4"):
        inspect_source(path, 1, "fp32")


def full_layer_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names that transformer-engine's full layer gives the same tensors."""
    spelled = (
        ("self_attention.linear_qkv.", "self_attention.layernorm_qkv."),
        ("input_layernorm.", "self_attention.layernorm_qkv.layer_norm_"),
        ("self_attention.linear_proj.", "self_attention.proj."),
        ("pre_mlp_layernorm.", "layernorm_mlp.layer_norm_"),
        ("mlp.linear_fc1.", "layernorm_mlp.fc1_"),
        ("mlp.linear_fc2.", "layernorm_mlp.fc2_"),
    )
    renamed = {}
    for key, value in state.items():
        for old, new in spelled:
            key = key.replace(old, new)
        renamed[key] = value
    return renamed


def test_transformer_engines_full_layer(tmp_path: Path) -> None:
    state = core_state()
    config = gpt_config(mcore_gpt=True)
    path = write_nemo(tmp_path / "gpt.nemo", config, {"model_weights.ckpt": full_layer_names(state)})
    ids = np.arange(POSITIONS)[None]
    assert np.abs(forward(run(path, tmp_path / "out"), ids) - core_forward(state, ids, HEADS, 0)).max() < 1e-4
