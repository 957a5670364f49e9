"""Hugging Face checkpoints that FasterTransformer cannot express, or that do not add up: refused, with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models.huggingface_models import HIDDEN, build, save, write_tokenizer

from export_scripts.arguments import ConvertArguments
from export_scripts.checkpoints.huggingface import unread
from export_scripts.checkpoints.huggingface.decoder import ARCHITECTURES
from export_scripts.conversion.plan.check import inspect_source
from export_scripts.convert import convert
from export_scripts.weights.schema import ModelDims
from handover.errors import CheckpointError


def refusal(path: Path, ranks: int = 1, data_type: str = "fp32") -> str:
    with pytest.raises(CheckpointError) as refused:
        inspect_source(path, ranks, data_type)
    return str(refused.value)


def change(path: Path, **changes: Any) -> Path:
    """Change keys of config.json; None as text is null, ... removes a key."""
    config = json.loads((path / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return dict(build("gpt2").state_dict())


def write(path: Path, state: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A GPT-2 with these weights."""
    path.mkdir()
    config = {"model_type": "gpt2", "vocab_size": 96, "n_positions": 24, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4}
    (path / "config.json").write_text(json.dumps({**config, "bos_token_id": 5, "eos_token_id": 7, **changes}))
    write_tokenizer(path)
    torch.save(state, path / "pytorch_model.bin")
    return path


def test_dimensions_are_those_of_the_checkpoint(gpt2: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert inspect_source(write(tmp_path / "m", gpt2), 2, "fp16").dims == ModelDims(4, 8, 128, 2, 24, 96)


def test_what_is_read_has_no_reason_for_not_being_read() -> None:
    assert not unread._REASONS.keys() & {each.model_type for each in ARCHITECTURES}


PHI3 = {
    "model_type": "phi3",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def test_the_nearest_is_named_once(tmp_path: Path) -> None:
    """Ling 2, as on the hub: by its keys EXAONE's mixture would be nearest."""
    keys = {"num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1, "n_group": 8, "topk_group": 4}
    keys |= {"moe_intermediate_size": 512, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "head_dim": 128}
    keys |= {"hidden_size": 2048, "num_hidden_layers": 20, "vocab_size": 157184, "intermediate_size": 5120}
    said = {**PHI3, **keys, "num_key_value_heads": 4, "norm_topk_prob": True}
    (tmp_path / "config.json").write_text(json.dumps({**said, "model_type": "of_tomorrow"}))
    assert "exaone_moe is nearest" in refusal(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**said, "model_type": "bailing_moe_v2"}))
    assert "glm4_moe computes the same" in refusal(tmp_path)
    assert "is nearest" not in refusal(tmp_path)


@pytest.mark.parametrize(
    ("config", "reasons"),
    [
        ({**PHI3, "model_type": "stablelm"}, ["'stablelm' has no table here", "layer norms", "llama, mistral"]),
        (
            {**PHI3, "model_type": "phimoe", "num_local_experts": 8},
            ["'phimoe'", "experts: 8  (those mixtures are read"],
        ),
        (
            {**PHI3, "model_type": "granite_swa", "logits_scaling": 8.0},
            ["'granite_swa' has no table", "logits_scaling: 8.0  ("],
        ),
        ({**PHI3, "model_type": "nemotron-nas", "block_configs": [{}]}, ["'nemotron-nas'", "(block_configs)"]),
        ({**PHI3, "model_type": "arcee"}, ["'arcee' has no table", "the llama family computes the same"]),
        ({**PHI3, "model_type": "cohere2"}, ["'cohere2'", "run side by side", "it rotates neighbours"]),
        ({**PHI3, "model_type": "of_tomorrow"}, ["'of_tomorrow' has no table here", "no table says how its tensors"]),
        ({"model_type": "whisper", "is_encoder_decoder": True}, ["'whisper'", "is_encoder_decoder: True"]),
        ({"model_type": "phi", "hidden_act": "gelu_new"}, ["'phi'", "lm_head.bias  ("]),
        ({"model_type": "gpt_neo", "attention_types": [[["global", "local"], 6]]}, ["'gpt_neo'", "attention_types  ("]),
        ({"model_type": "bert"}, ["'bert' is no architecture that FasterTransformer can express", "gpt2, opt, bloom"]),
        ({}, ["model_type None"]),
    ],
)
def test_unknown_architectures_are_refused_with_what_is_in_the_way(
    config: dict[str, Any], reasons: list[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path)
    assert all(reason in message for reason in reasons)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "activation_function", "quick_gelu"),
        ("gpt2", "activation_function", "silu"),
        ("opt", "layer_norm_elementwise_affine", False),
        ("opt", "activation_function", "tanh"),
        ("bloom", "apply_residual_connection_post_layernorm", True),
        ("xglm", "add_cross_attention", True),
        ("gptj", "activation_function", "relu"),
        ("gpt_neox", "hidden_act", "relu"),
        ("gpt_neox", "rope_scaling", {"type": "linear", "factor": 2.0}),
        ("gpt_neox", "rotary_emb_base", 500000),
        ("gpt_neox", "quantization_config", {"quant_method": "bitsandbytes"}),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_key_and_value(
    family: str, key: str, value: Any, tmp_path: Path
) -> None:
    save(family, tmp_path)
    message = refusal(change(tmp_path, **{key: value}))
    assert "is quantised (bitsandbytes)" in message if key == "quantization_config" else f"{key}: {value}  (" in message


@pytest.mark.parametrize(("key", "value"), [("rope_theta", 1e6), ("rope_type", "yarn")])
def test_rotations_of_newer_configurations(key: str, value: Any, tmp_path: Path) -> None:
    save("gpt_neox", tmp_path)
    rope = {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default", key: value}
    assert f"{key}: {value}  (" in refusal(change(tmp_path, rope_parameters=rope))


def test_opt_350m_needs_both_of_its_projections(tmp_path: Path) -> None:
    save("opt", tmp_path / "without")
    assert "decoder.project_in.weight  missing" in refusal(change(tmp_path / "without", word_embed_proj_dim=16))
    save("opt", tmp_path / "other", word_embed_proj_dim=16)
    path = tmp_path / "other/model.safetensors"
    tensors = load_file(path)
    tensors["model.decoder.project_out.weight"] = torch.zeros(8, HIDDEN)
    save_file(tensors, path)
    assert "decoder.project_out.weight  [8, 32]  cannot be multiplied" in refusal(tmp_path / "other")


@pytest.mark.parametrize(
    ("key", "value"), [("n_layer", 0), ("n_head", "4"), ("n_head", 5), ("n_embd", None), ("vocab_size", True)]
)
def test_dimensions_that_are_absurd(gpt2: dict[str, torch.Tensor], key: str, value: Any, tmp_path: Path) -> None:
    assert key in refusal(write(tmp_path / "m", gpt2, **{key: value}))


def test_every_difference_is_listed(gpt2: dict[str, torch.Tensor], tmp_path: Path) -> None:
    state: dict[str, Any] = dict(gpt2)
    state["transformer.h.0.attn.lora_A.weight"] = torch.zeros(2, HIDDEN)
    state["transformer.h.2.ln_1.weight"] = torch.zeros(HIDDEN)
    state["score.weight"] = torch.zeros(2, HIDDEN)
    state["transformer.h.1.mlp.c_fc.weight"] = state["transformer.h.1.mlp.c_fc.weight"].T
    state["epoch"] = 3
    del state["transformer.h.0.ln_2.weight"]
    message = refusal(write(tmp_path / "m", state))
    assert "6 differences from Hugging Face GPT-2" in message
    for line in (
        "h.0.attn.lora_A.weight  [2, 32]  has no rule",
        "h.2.ln_1.weight  [32]  gives model.layers.2.input_layernorm.weight, which this model does not have",
        "score.weight  [2, 32]  has no rule",
        "gives model.layers.1.mlp.dense_h_to_4h.weight as [128, 32] instead of [32, 128]",
        "epoch  is not a tensor and has no rule",
        "model.layers.0.post_attention_layernorm.weight  [32]  has no source",
    ):
        assert line in message


def test_part_of_a_fused_tensor_is_missing(tmp_path: Path) -> None:
    model = save("gptj", tmp_path)
    state = model.state_dict()
    del state["transformer.h.1.attn.k_proj.weight"]
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert "h.1.attn.k_proj.weight  missing beside h.1.attn" in refusal(tmp_path)


@pytest.mark.parametrize("family", ["gptj", "gpt_neox", "gpt2"])
def test_an_untied_head_must_be_there(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path, tie_word_embeddings=False)
    state = {key: value for key, value in model.state_dict().items() if "lm_head.weight" not in key}
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert "model.lm_head.weight  [96, 32]  has no source" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("family", "key", "target"),
    [
        ("gpt2", "transformer.h.1.mlp.c_fc.bias", "model.layers.1.mlp.dense_h_to_4h.bias"),
        ("gptj", "lm_head.bias", "model.lm_head.bias"),
        ("bloom", "transformer.ln_f.bias", "model.final_layernorm.bias"),
        (
            "gpt_neox",
            "gpt_neox.layers.0.attention.query_key_value.bias",
            "model.layers.0.attention.query_key_value.bias",
        ),
    ],
)
def test_a_missing_bias_does_not_become_zeros(family: str, key: str, target: str, tmp_path: Path) -> None:
    state = dict(save(family, tmp_path).state_dict())
    del state[key]
    (tmp_path / "model.safetensors").unlink()
    torch.save(state, tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert f"\n  {target}  [" in message
    assert "has no source, and the configuration does not say that there is none" in message


@pytest.mark.parametrize(
    ("family", "key", "named"),
    [
        ("opt", "enable_bias", "layers.0.fc1.bias  [128]"),
        ("gpt_neox", "attention_bias", "layers.0.attention.dense.bias"),
    ],
)
def test_biases_that_the_configuration_leaves_out_are_not_used(
    family: str, key: str, named: str, tmp_path: Path
) -> None:
    """transformers computes without them, and says that the files hold more than the model."""
    save(family, tmp_path)
    assert named in refusal(change(tmp_path, **{key: False}))


def test_keys_with_and_without_prefix(gpt2: dict[str, torch.Tensor], tmp_path: Path) -> None:
    state = {**gpt2, "wte.weight": gpt2["transformer.wte.weight"]}
    assert "one tensor is there under two names, transformer.wte.weight and wte.weight" in refusal(
        write(tmp_path / "m", state)
    )


def test_weights_that_are_no_weights(gpt2: dict[str, torch.Tensor], tmp_path: Path) -> None:
    state = {**gpt2, "transformer.ln_f.weight": torch.zeros(HIDDEN, dtype=torch.int8)}
    assert "ln_f.weight  int8" in refusal(write(tmp_path / "m", state))


def test_overflow_is_named(gpt2: dict[str, torch.Tensor], tmp_path: Path) -> None:
    weight = gpt2["transformer.h.1.mlp.c_fc.weight"].clone()
    weight[30, 100] = -70000
    model = write(tmp_path / "m", {**gpt2, "transformer.h.1.mlp.c_fc.weight": weight})
    with pytest.raises(CheckpointError) as refused:
        convert(ConvertArguments(model, tmp_path / "out", 2, "fp16"))
    said = "model.layers.1.mlp.dense_h_to_4h.weight overflows fp16: its largest magnitude is 7e+04, at [30, 100]"
    assert said in str(refused.value)
    assert not (tmp_path / "out/manifest.json").exists()


def test_special_ids_that_are_no_numbers(gpt2: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert "eos_token_id is 'x', not a number" in refusal(write(tmp_path / "m", gpt2, eos_token_id="x"))


def test_ranks_that_do_not_divide_the_heads(gpt2: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert "tensor_para_size 3 does not divide the model's 4 heads" in refusal(write(tmp_path / "m", gpt2), 3)


def test_adapters_and_directories_without_weights(gpt2: dict[str, torch.Tensor], tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "gpt2"}')
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    assert "holds an adapter of gpt2, not a model" in refusal(adapter)
    empty = write(tmp_path / "m", gpt2)
    (empty / "pytorch_model.bin").unlink()
    assert "has no weights that are read" in refusal(empty)


def test_one_model_among_other_files_is_found_and_several_are_listed(
    gpt2: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    write(tmp_path / "first", gpt2)
    (tmp_path / "notes.txt").write_text("downloaded on Tuesday")
    assert inspect_source(tmp_path, 1, "fp32").dims.axis_size("num_layer") == 2
    write(tmp_path / "second", gpt2)
    message = refusal(tmp_path)
    assert "holds 2 checkpoints" in message
    assert "first" in message and "second" in message


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt_neox", {"rotary_pct": 0.4}, "rotary_embedding: 3  (it rotates pairs of a head's 8 elements"),
        ("gptj", {"rotary_dim": 10}, "rotary_embedding: 10  (it rotates pairs"),
        ("gpt2", {"layer_norm_epsilon": 0.0}, "layer_norm_epsilon is 0.0"),
        ("gpt2", {"layer_norm_epsilon": 1.0}, "layer_norm_epsilon is 1.0"),
    ],
)
def test_what_an_engine_would_refuse_is_refused_before(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save(family, tmp_path, **({} if "rotary" in words else changes))
    assert words in refusal(change(tmp_path, **changes, **({"rope_parameters": ...} if "pct" in str(changes) else {})))
