"""Checkpoints that cannot be expressed or do not add up: refused, with every key and every difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints.nemo_archive import HIDDEN, VOCAB, gpt_config, gpt_state, write_gpt, write_nemo

from export_scripts.conversion.plan.check import inspect_source
from export_scripts.weights.schema import ModelDims
from handover.errors import CheckpointError

LAYER_0 = "model.language_model.encoder.layers.0."


def refusal(path: Path, ranks: int = 1, data_type: str = "fp16") -> str:
    with pytest.raises(CheckpointError) as refused:
        inspect_source(path, ranks, data_type)
    return str(refused.value)


def test_dimensions_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    dims = inspect_source(write_gpt(tmp_path / "gpt.nemo", layernorm_epsilon=1e-3), 2, "fp16").dims
    assert dims == ModelDims(4, 2, 12, 2, 6, VOCAB, layernorm_eps=1e-3)
    assert dims.hidden_units == HIDDEN


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("position_embedding_type", "kerple"),
        ("position_embedding_type", "xpos"),
        ("activation", "swiglu"),
        ("activation", "fast-geglu"),
        ("activation", "squared-relu"),
        ("normalization", "rmsnorm"),
        ("transformer_block_type", "post_ln"),
        ("attention_type", "multiquery"),
        ("kv_channels", 16),
        ("headscale", True),
        ("normalize_attention_scores", False),
        ("num_moe_experts", 8),
        ("virtual_pipeline_model_parallel_size", 2),
    ],
)
def test_architecture_is_refused_by_key_and_value(key: str, value: Any, tmp_path: Path) -> None:
    assert f"{key}: {value}  (" in refusal(write_gpt(tmp_path / "gpt.nemo", **{key: value}))


def test_all_keys_in_the_way_are_named_at_once(tmp_path: Path) -> None:
    changes = {"position_embedding_type": "sandwich", "activation": "swiglu", "normalization": "rmsnorm"}
    message = refusal(write_gpt(tmp_path / "gpt.nemo", **changes))
    assert all(f"{key}: {value}" in message for key, value in changes.items())


@pytest.mark.parametrize(
    "settings",
    [
        {"position_embedding_type": "learned_absolute", "activation": "gelu", "normalization": "layernorm"},
        {"num_query_groups": 4, "kv_channels": 2, "num_moe_experts": None, "mcore_gpt": False},
        {"apply_query_key_layer_scaling": True, "headscale": False, "openai_gelu": True},
    ],
)
def test_what_can_be_expressed_is_accepted(settings: dict[str, Any], tmp_path: Path) -> None:
    assert vars(inspect_source(write_gpt(tmp_path / "gpt.nemo", **settings), 4, "fp32").dims)["num_layer"] == 2


@pytest.mark.parametrize("model", ["MTEncDecModel", "MegatronBertModel"])
def test_other_models_are_named(model: str, tmp_path: Path) -> None:
    target = f"nemo.collections.nlp.models.language_modeling.{model.lower()}.{model}"
    assert f"is a {model}, not a GPT" in refusal(write_gpt(tmp_path / "gpt.nemo", target=target))


def test_keys_that_are_no_gpts(tmp_path: Path) -> None:
    assert "has no keys of a GPT" in refusal(write_gpt(tmp_path / "other.nemo", {"conv1.weight": torch.zeros(2)}))


@pytest.mark.parametrize(("ranks", "legal"), [(3, "1, 2, 4"), (8, "1, 2, 4"), (0, "1, 2, 4"), (-2, "1, 2, 4")])
def test_ranks_that_do_not_divide_the_heads(ranks: int, legal: str, tmp_path: Path) -> None:
    message = refusal(write_gpt(tmp_path / "gpt.nemo"), ranks)
    assert f"tensor_para_size {ranks} does not divide the model's 4 heads" in message
    assert f"legal: {legal}" in message


def test_ranks_that_do_not_divide_the_feed_forward(tmp_path: Path) -> None:
    state = {k: v for k, v in gpt_state().items() if "dense_h_to_4h" not in k and "4h_to_h.weight" not in k}
    for layer in range(2):
        state[f"model.language_model.encoder.layers.{layer}.mlp.dense_h_to_4h.weight"] = torch.zeros(10, HIDDEN)
        state[f"model.language_model.encoder.layers.{layer}.mlp.dense_4h_to_h.weight"] = torch.zeros(HIDDEN, 10)
    path = write_gpt(tmp_path / "gpt.nemo", state, ffn_hidden_size=10)
    assert "does not divide the feed-forward's width 10" in refusal(path, 4)
    assert vars(inspect_source(path, 2, "fp16").dims)["inter_size"] == 10


def test_unknown_data_type_gets_the_nearest(tmp_path: Path) -> None:
    assert "did you mean 'fp16'?" in refusal(write_gpt(tmp_path / "gpt.nemo"), data_type="f16")


def test_every_difference_is_listed(tmp_path: Path) -> None:
    state = gpt_state()
    state[f"{LAYER_0}self_attention.rotary_emb.inv_freq"] = torch.zeros(1)
    state["model.language_model.output_layer.weight"] = torch.zeros(VOCAB, HIDDEN)
    state[f"{LAYER_0}mlp.dense_h_to_4h.weight"] = torch.zeros(HIDDEN, 12)
    state[f"{LAYER_0}self_attention.query_key_value.weight"] = torch.zeros(20, HIDDEN)
    state["step"] = 7
    del state[f"{LAYER_0}input_layernorm.weight"]
    message = refusal(write_gpt(tmp_path / "gpt.nemo", state))
    assert "6 differences from NeMo GPT with legacy keys" in message
    for line in (
        "rotary_emb.inv_freq  [1]  has no rule",
        "output_layer.weight  [10, 8]  gives model.lm_head.weight, which this model does not have",
        "dense_h_to_4h.weight  [8, 12]  gives model.layers.0.mlp.dense_h_to_4h.weight as [12, 8] instead of [8, 12]",
        "query_key_value.weight  [20, 8]  gives model.layers.0.attention.query_key_value.weight but does not fit",
        "step  is not a tensor and has no rule",
        "model.layers.0.input_layernorm.weight  [8]  has no source",
    ):
        assert line in message


def test_missing_and_surplus_layers(tmp_path: Path) -> None:
    assert "model.layers.2.attention.dense.weight  [8, 8]  has no source" in refusal(
        write_gpt(tmp_path / "gpt.nemo", num_layers=3)
    )
    assert "gives model.layers.1.mlp.dense_h_to_4h.weight, which" in refusal(
        write_gpt(tmp_path / "gpt2.nemo", num_layers=1)
    )


def test_missing_untied_head_and_missing_embedding(tmp_path: Path) -> None:
    path = write_gpt(tmp_path / "gpt.nemo", share_embeddings_and_output_weights=False)
    assert "model.lm_head.weight  [10, 8]  has no source" in refusal(path)
    state = {key: value for key, value in gpt_state().items() if "word_embeddings" not in key}
    assert "model.wte" in refusal(write_gpt(tmp_path / "gpt2.nemo", state))


def test_tensors_that_are_not_weights(tmp_path: Path) -> None:
    state = gpt_state()
    state[f"{LAYER_0}input_layernorm.weight"] = torch.zeros(HIDDEN, dtype=torch.int8)
    assert f"{LAYER_0}input_layernorm.weight  int8" in refusal(write_gpt(tmp_path / "gpt.nemo", state))


@pytest.mark.parametrize("what", ["keys", "shapes", "types"])
def test_training_ranks_that_do_not_fit_together(what: str, tmp_path: Path) -> None:
    states = [gpt_state(), gpt_state()]
    key = f"{LAYER_0}self_attention.dense.weight"
    if what == "keys":
        del states[1][key]
    else:
        states[1][key] = states[1][key][:4] if what == "shapes" else states[1][key].half()
    ranks = {f"mp_rank_{rank:02d}/model_weights.ckpt": state for rank, state in enumerate(states)}
    path = write_nemo(tmp_path / "gpt.nemo", gpt_config(tensor_model_parallel_size=2), ranks)
    message = refusal(path)
    assert key in message
    assert "other keys" in message if what == "keys" else "do not fit together" in message


@pytest.mark.parametrize("key", ["hidden_size", "num_layers", "num_attention_heads"])
@pytest.mark.parametrize("value", [None, "many", 0])
def test_dimensions_that_are_missing_or_absurd(key: str, value: Any, tmp_path: Path) -> None:
    assert key in refusal(write_gpt(tmp_path / "gpt.nemo", **{key: value}))
