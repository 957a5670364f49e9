"""Every key of ``config.json`` that transformers reads of a model: honoured, refused by name, or without effect.

The list is made from the installed package's source. What becomes of a key is seen, not said: the dimensions and the
table change, the conversion is refused, or transformers' own logits stay what they were.
"""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models.huggingface_models import IDS, filling
from support.tiny_models.transformers_keys import MODEL_TYPES, accounted_for, keys_read

from export_scripts.checkpoints.huggingface import t5
from export_scripts.checkpoints.huggingface.decoder import ARCHITECTURES, described
from export_scripts.weights.settings import Settings
from handover.errors import CheckpointError

_LAYERS = 2
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LONG = {"rope_type": "longrope", "short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [5.0, 6.0, 7.0, 8.0]}
_WIDTHS: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": _LAYERS, "n_head": 4, "n_positions": 24, "n_inner": 48}
_T5: dict[str, Any] = {"d_model": 32, "num_layers": _LAYERS, "num_heads": 4, "d_kv": 8, "d_ff": 48}
_LLAMA: dict[str, Any] = {
    **_WIDTHS,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "rope_parameters": {**_LLAMA3, "rope_theta": 500.0},
}
_WINDOW = {"sliding_window": 5}
_QWEN = {**_WINDOW, "use_sliding_window": True, "max_window_layers": 0}
_GROUPED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 3, "topk_group": 2}
_GROUPED |= {"first_k_dense_replace": 0, "norm_topk_prob": False}
_LATENT = {
    **{**_LLAMA, **_GROUPED, "num_key_value_heads": 4, "n_routed_experts": 6, "n_shared_experts": 1},
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 9},
}
_DELTA: dict[str, Any] = {
    **{**_LLAMA, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 2},
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 4},
}
_DELTA_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_DELTA_MOE |= {"shared_expert_intermediate_size": 28}
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "nemotron", "gemma", "olmo2", "granite"), _LLAMA),
    "phi3": {**_LLAMA, **_WINDOW, "rope_parameters": {**_LONG, "rope_theta": 500.0}, "pad_token_id": None},
    "smollm3": {**_LLAMA, "sliding_window": 5, "use_sliding_window": True, "no_rope_layer_interval": 2}
    | {"pad_token_id": None},
    "exaone4": {**_LLAMA, "sliding_window": 5, "sliding_window_pattern": 2},
    **dict.fromkeys(("mistral", "gemma2", "starcoder2", "mixtral"), {**_LLAMA, **_WINDOW}),
    **dict.fromkeys(("qwen2", "qwen3"), {**_LLAMA, **_QWEN}),
    "gemma3_text": {**_WIDTHS, **_WINDOW, "intermediate_size": 48, "num_key_value_heads": 2, "rope_scaling": _LLAMA3}
    | {"sliding_window_pattern": 2},
    "qwen3_moe": {**_LLAMA, **_QWEN, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "qwen3_next": {**_DELTA, **_DELTA_MOE, "norm_topk_prob": False},
    "llama4_text": {**_LLAMA, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "floor_scale": 3}
    | {"intermediate_size_mlp": 40, "no_rope_layer_interval": 2, "attention_chunk_size": 5, "attn_scale": 0.4},
    **{"qwen3_5_text": _DELTA, "qwen3_5_moe_text": {**_DELTA, **_DELTA_MOE}},
    "deepseek_v3": {**_LATENT, "num_nextn_predict_layers": 0},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy"},
    "glm4_moe_lite": {key: value for key, value in _LATENT.items() if key != "first_k_dense_replace"}
    | {"num_nextn_predict_layers": 0},
    "olmoe": {**_LLAMA, "num_experts": 6, "num_experts_per_tok": 2},
    "minimax_m2": {**_LLAMA, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {**_LLAMA, **_GROUPED, "n_routed_experts": 6, "num_nextn_predict_layers": 0},
    "ernie4_5_moe": {**_LLAMA, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20}
    | {"moe_layer_start_index": 0},
    "gpt_oss": {**_LLAMA, "sliding_window": 5, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2}
    | {"attention_bias": False},
    "exaone_moe": {**_LLAMA, **_GROUPED, "num_experts": 6, "sliding_window": 5, "sliding_window_pattern": 2},
    "nemotron_h": {
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
        **{"intermediate_size": 48, "max_position_embeddings": 24, "hybrid_override_pattern": "ME*-"},
        **{"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "chunk_size": 8},
        **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 3, "topk_group": 2},
        **{"moe_shared_expert_intermediate_size": 28, "norm_topk_prob": False},
    },
    "falcon_h1": {
        **{**_LLAMA, "mamba_n_heads": 4, "mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_n_groups": 2},
        **{"mamba_d_state": 6, "mamba_chunk_size": 8},
    },
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    "gptj": {**_GPT2, "rotary_dim": 4},
    "gpt_neox": {**_WIDTHS, "intermediate_size": 48, "hidden_act": "gelu_new", "attention_bias": False},
    "opt": {**_WIDTHS, "ffn_dim": 48, "word_embed_proj_dim": 32, "activation_function": "gelu_new"},
    "bloom": {"hidden_size": 32, "n_layer": _LAYERS, "n_head": 4, "pretraining_tp": 4},
    "xglm": {
        **{"d_model": 32, "num_layers": _LAYERS, "attention_heads": 4, "ffn_dim": 48},
        **{"max_position_embeddings": 24, "activation_function": "gelu_new"},
    },
    **dict.fromkeys(("t5", "mt5"), {**_T5, "feed_forward_proj": "gated-gelu", "transformers_version": "5.0.0"}),
}
"""Tiny configurations, in which every key of the table matters."""
_OTHER: dict[str, Any] = {
    **{"expand": 3, "mamba_expand": 3, "mamba_proj_bias": True, "residual_in_fp32": True},
    **{"time_step_limit": [0.0, 0.5], "mamba_dt_limit": [0.0, 0.5], "mamba_ssm_cache_dtype": "bfloat16"},
    **{"moe_shared_expert_overlap": False, "num_logits_to_keep": 2, "use_mamba_kernels": False},
    **{"mamba_dt_init_floor": 0.01, "mamba_dt_max": 0.5, "time_step_floor": 0.01, "time_step_max": 0.5},
    **{"rescale_prenorm_residual": False, "mtp_hybrid_override_pattern": "M", "mtp_layers_block_type": ["moe"]},
    **{"hidden_size": 64, "n_embd": 64, "n_embed": 64, "d_model": 64, "num_attention_heads": 2, "n_head": 2},
    **{"attention_heads": 2, "num_heads": 2, "num_hidden_layers": 3, "n_layer": 3, "num_layers": 3, "vocab_size": 97},
    **{"num_decoder_layers": 3, "intermediate_size": 96, "n_inner": 96, "ffn_dim": 96, "d_ff": 96, "d_kv": 4},
    **{"max_position_embeddings": 32, "n_positions": 32, "num_key_value_heads": 1, "head_dim": 4, "rotary_dim": 2},
    **{"hidden_act": "relu", "hidden_activation": "relu", "activation_function": "relu", "dense_act_fn": "relu"},
    **{"feed_forward_proj": "relu", "is_gated_act": False, "num_experts": 4, "num_local_experts": 4},
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon", "layer_norm_eps"), 1e-3),
    **dict.fromkeys(("attention_bias", "mlp_bias"), True),
    **dict.fromkeys(("use_bias", "is_causal", "scale_attn_weights", "use_parallel_residual", "multi_query"), False),
    **dict.fromkeys(("do_layer_norm_before", "enable_bias", "scale_embedding", "use_sliding_window"), False),
    **{"layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True, "word_embed_proj_dim": 16},
    **dict.fromkeys(("scale_attn_by_inverse_layer_idx", "add_cross_attention", "is_encoder_decoder"), True),
    **{"apply_residual_connection_post_layernorm": True, "use_bidirectional_attention": True, "rotary_pct": 0.5},
    **{"sliding_window": 7, "max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention"]},
    **{"rope_theta": 300.0, "rotary_emb_base": 300.0, "partial_rotary_factor": 0.75, "num_experts_per_tok": 1},
    "rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 400.0},
    "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 400.0},
    **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 0.5),
    **{"no_rope_layers": [0, 1], "no_rope_layer_interval": 1},
    **{"rope_local_base_freq": 300.0, "sliding_window_pattern": 3},
    **{"original_max_position_embeddings": 8, "query_pre_attn_scalar": 7, "relative_attention_num_buckets": 16},
    **{"attn_logit_softcapping": 1.0, "final_logit_softcapping": 1.0, "relative_attention_max_distance": 64},
    **{"per_layer_config": {"0": {"head_dim": 4}}, "attention_chunk_size": 4, "kv_sharing_modes": ["reuse", "none"]},
    **{"tie_word_embeddings": True, "scale_decoder_outputs": True, "is_decoder": True},
    **{"moe_intermediate_size": 12, "norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    **{"n_group": 2, "topk_group": 1, "n_routed_experts": 12, "n_shared_experts": 2, "num_shared_experts": 2},
    **{"routed_scaling_factor": 0.5, "use_qk_norm": True, "moe_k": 1, "moe_num_experts": 4},
    **{"moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 0, "moe_layer_interval": 2},
    **{"swiglu_alpha": 1.5, "swiglu_limit": 0.1},
    **{"moe_norm_min": 0.5, "num_nextn_predict_layers": 2, "num_mtp_layers": 2},
    **{"topk_method": "greedy", "q_lora_rank": 9, "kv_lora_rank": 9, "qk_nope_head_dim": 7, "v_head_dim": 7},
    **{"qk_rope_head_dim": 4, "rope_interleave": False},
    **{"clip_qkv": 5.0, "intermediate_size_mlp": 56, "interleave_moe_layer_step": 2, "moe_layers": [0]},
    **{"attn_temperature_tuning": False, "attn_scale": 0.9, "floor_scale": 2},
    **{"full_attention_interval": 1, "shared_expert_intermediate_size": 12, "linear_conv_kernel_dim": 3},
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 3, "linear_value_head_dim": 3},
    **{"hybrid_override_pattern": "MM*-", "layers_block_type": ["linear_attention", "mlp"], "mlp_hidden_act": "silu"},
    **{"mamba_num_heads": 2, "mamba_head_dim": 4, "n_groups": 1, "mamba_n_groups": 1, "ssm_state_size": 4},
    **{"conv_kernel": 3, "mamba_d_conv": 3, "use_conv_bias": False, "mamba_conv_bias": False, "chunk_size": 4},
    **{"mamba_chunk_size": 4, "time_step_min": 0.3, "mamba_dt_min": 0.3, "mamba_hidden_act": "relu"},
    **{"moe_shared_expert_intermediate_size": 12, "moe_latent_size": 10},
    **{"mamba_n_heads": 2, "mamba_d_ssm": 48, "mamba_d_head": 4, "mamba_d_state": 4, "mamba_norm_before_gate": False},
    **{"mamba_rms_norm": True, "projectors_bias": True, "ssm_multipliers": [0.5] * 5, "mlp_multipliers": [0.5, 2.0]},
    **dict.fromkeys(("lm_head_multiplier", "key_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 0.5),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 0.5),
    # What changes nothing:
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "dropout"), 0.5),
    **dict.fromkeys(("embedding_dropout", "residual_dropout", "activation_dropout", "layerdrop", "dropout_rate"), 0.5),
    **dict.fromkeys(("router_jitter_noise", "router_aux_loss_coef", "classifier_dropout", "initializer_range"), 0.5),
    **dict.fromkeys(("init_std", "initializer_factor", "summary_first_dropout", "summary_last_dropout"), 0.5),
    **dict.fromkeys(("use_cache", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_router_logits", "slow_but_exact"), True),
    **{"reorder_and_upcast_attn": True, "chunk_size_feed_forward": 2, "pretraining_tp": 2, "num_labels": 3},
    **{"problem_type": "regression", "bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 5, "sep_token_id": 6},
    **{"decoder_start_token_id": 3, "torch_dtype": "float32", "architectures": ["A"], "transformers_version": "9.0"},
    **{"number_of_conv_states": 2, "mlp_layer_types": ["dense", "dense"], "first_k_dense_replace": 1},
    **{"default_theta": 5.0, "qk_head_dim": 5},
}
_OF_SOME = {
    **{("t5", "is_encoder_decoder"): False, ("mt5", "is_encoder_decoder"): False},
    ("glm4_moe_lite", "first_k_dense_replace"): 2,
    ("gpt_bigcode", "num_key_value_heads"): 4,
    **{("nemotron_h", "use_bias"): True, ("nemotron_h", "num_key_value_heads"): 4},
    ("ernie4_5_moe", "use_bias"): True,
    **{("phi3", key): {**_LONG, "short_factor": [2.0] * 4} for key in ("rope_scaling", "rope_parameters")},
    **{
        (name, "layer_types"): ["full_attention", "full_attention"]
        for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
    ("llama4_text", "layer_types"): ["full_attention", "chunked_attention"],
    ("llama4_text", "use_qk_norm"): False,
    ("smollm3", "layer_types"): ["sliding_attention", "full_attention"],
    ("gemma3_text", "rope_parameters"): {"full_attention": {"rope_theta": 300.0}},
}
"""Another value of each key than ``SIZES`` and the defaults have; one that is not here is no key of a file."""
_POPPED = {"torch_dtype", "rope_scaling", "rope_theta", "partial_rotary_factor", "num_labels", "tie_word_embeddings"}
_POPPED |= {"mamba_dt_init_floor", "mamba_dt_limit", "mamba_dt_max", "mamba_expand", "num_hidden_layers"}
"""What a class takes and does not keep by that name."""
_UNTIED = {"tie_word_embeddings": False}


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    return copy.deepcopy({"model_type": model_type, "vocab_size": 96, **IDS, **SIZES[model_type], **_UNTIED, **changes})


def outcome(config: dict[str, Any]) -> str:
    """What the conversion makes of a configuration: dimensions and table, or the refusal."""
    try:
        if config["model_type"] in ("t5", "mt5"):
            return repr(t5.read_dims(t5.settled(config)))
        architecture, dims = described(Settings(config))
        table = architecture.table(architecture.settled(Settings(config)), dims)
        made = [generate(dims).tobytes() for generate in table.generated.values()]
        return repr((dims, table.rules, table.biases, made, architecture.products(Settings(config)).keys()))
    except CheckpointError as error:
        return f"refused: {error.problem}"


def other_of(model_type: str, key: str) -> dict[str, Any]:
    """Another value of a key; nothing for what is no key of a file."""
    value = _OF_SOME.get((model_type, key), _OTHER.get(key))
    return {} if value is None else {key: value}


def changed(model_type: str, key: str) -> dict[str, Any]:
    """The configuration with another value of one key; the rotation's keys stand alone, as one hides the other."""
    config = config_of(model_type) | other_of(model_type, key)
    if key in ("rope_theta", "original_max_position_embeddings") and "rope_parameters" in config:
        del config["rope_parameters"]["rope_theta"]
    return config


def test_the_table_names_the_keys_that_the_installed_transformers_reads() -> None:
    assert {each.model_type for each in ARCHITECTURES} | {"t5", "mt5"} == set(MODEL_TYPES)
    for model_type in MODEL_TYPES:
        assert keys_read(model_type) == accounted_for(model_type).keys(), model_type


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_becomes_of_each_key_is_what_the_table_says(model_type: str) -> None:
    table = accounted_for(model_type)
    del table["transformers_weights"]  # it names a file
    seen, base = {}, config_of(model_type)
    of_base = outcome(base)
    for key, said in table.items():
        config = changed(model_type, key)
        made = outcome(config)
        without = {k: base[k] if k == key else value for k, value in config.items() if k != key or k in base}
        plain = of_base if without == base else outcome(without)
        if made.startswith("refused") and key in made:
            seen[key] = "refused"
        elif made != plain:
            seen[key] = "honoured"
        else:  # the reason stands in the table
            seen[key] = said if said not in ("refused", "honoured") else "without effect"
    assert seen == table


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_keys_without_effect_leave_transformers_logits_as_they_are(model_type: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    ids = torch.arange(1, 17)[None]
    keys = [key for key, said in accounted_for(model_type).items() if said not in ("honoured", "refused")]
    other = {name: value for key in keys for name, value in other_of(model_type, key).items()}
    assert len(other) > 15
    made = [CONFIG_MAPPING[model_type].from_dict(config_of(model_type, **changes)) for changes in ({}, other)]
    are_set = [key for key in other if getattr(made[0], key, None) != getattr(made[1], key, None)]
    assert other.keys() - are_set <= _POPPED, "another value"
    plain, mutated = (logits(config_of(model_type, **changes), ids) for changes in ({}, other))
    assert (plain - mutated).abs().max() < 1e-5


_NOT_IN_LOGITS = {"max_position_embeddings", "transformers_weights", "intermediate_size", "intermediate_size_mlp"}
_NOT_IN_LOGITS |= {"num_nextn_predict_layers", "num_mtp_layers", "n_positions"}
"""Honoured keys that need not change the logits of these configurations: of limits, files, dense layers, predictors."""


@pytest.mark.in_ci(when=lambda at: at.model_type in ("gemma3_text", "gpt2"))
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_honoured_keys_change_transformers_logits(model_type: str) -> None:
    """A class may keep a key and never use it."""
    ids, unused = torch.arange(1, 17)[None], []
    for key, said in accounted_for(model_type).items():
        if said == "honoured" and key not in _NOT_IN_LOGITS:
            base, config = config_of(model_type), changed(model_type, key)
            plain = {k: base[k] if k == key else value for k, value in config.items() if k != key or k in base}
            try:
                found, expected = (logits(copy.deepcopy(each), ids) for each in (config, plain))
            except (ValueError, RuntimeError):  # the class does not take the other value, whatever it does with it
                continue
            unused += [key] if found.shape == expected.shape and torch.allclose(found, expected, atol=1e-6) else []
    assert unused == _NARROW.get(model_type, [])


_NARROW = {
    "mistral": ["layer_types"],  # makes it Ministral
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), ["rope_theta"]),  # of two rotated elements
    "deepseek_v2": ["n_group", "topk_method"],  # its best experts are in its best groups
    "falcon_h1": ["mamba_chunk_size", "mamba_norm_before_gate"],  # a way to compute; of a norm that is not there
    "nemotron_h": ["chunk_size", "mamba_chunk_size"],
}


def logits(config: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    is_t5 = config["model_type"] in ("t5", "mt5")
    made = CONFIG_MAPPING[config["model_type"]].from_dict(config)
    auto = transformers.AutoModelForSeq2SeqLM if is_t5 else transformers.AutoModelForCausalLM
    model = auto.from_config(made, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(filling(name, tuple(parameter.shape))))
        result: torch.Tensor = model(ids, **({"decoder_input_ids": ids} if is_t5 else {})).logits
    return result


_SAYS_NOTHING: Any = object()
_LINEAR = {"rope_type": "linear", "factor": 2.0}
_ROPES: list[Any] = [
    *(_SAYS_NOTHING, None, {}, {"rope_type": "default"}, {"rope_theta": 600.0}, {"type": "linear", "factor": 4.0}),
    *({**_LINEAR, "rope_theta": 300.0}, {**_LINEAR, "type": "default"}, {"type": "yarn", "factor": 2.0}),
    *({**_LLAMA3, "original_max_position_embeddings": 16}, _LLAMA3),
    {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
]
_SOME: dict[str, list[Any]] = {
    "rope_scaling": _ROPES,
    "rope_parameters": _ROPES,
    "rope_theta": [_SAYS_NOTHING, 500.0],
    "partial_rotary_factor": [_SAYS_NOTHING, _SAYS_NOTHING, 0.5, 1.0],
    "original_max_position_embeddings": [_SAYS_NOTHING, 8],
    **{"rotary_emb_base": [_SAYS_NOTHING, 10000, 400], "rotary_pct": [_SAYS_NOTHING, 0.5, 1.0]},
    "rope_local_base_freq": [_SAYS_NOTHING, 400.0],
    "sliding_window_pattern": [_SAYS_NOTHING, 1, 2],
    "sliding_window": [_SAYS_NOTHING, None, 5],
    "use_sliding_window": [_SAYS_NOTHING, True, False],
    "no_rope_layers": [_SAYS_NOTHING, None, [0, 1], [1, 1, 0]],
    "no_rope_layer_interval": [_SAYS_NOTHING, 1, 2],
    "max_window_layers": [_SAYS_NOTHING, 0, 1, 2],
    "layer_types": [
        *(_SAYS_NOTHING, _SAYS_NOTHING, None, ["sliding_attention"] * 2, ["attention", "full_attention"]),
        *(["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]),
    ],
    **dict.fromkeys(("hidden_act", "hidden_activation"), [_SAYS_NOTHING, "gelu", "silu", "gelu_pytorch_tanh"]),
    "activation_function": [_SAYS_NOTHING, "relu", "gelu_new"],
    **dict.fromkeys(("num_attention_heads", "n_head", "attention_heads", "num_heads"), [_SAYS_NOTHING, 2, 4, 8]),
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed", "d_model"), [_SAYS_NOTHING, 32, 64]),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "d_kv"), [_SAYS_NOTHING, 2, 4]),
    "feed_forward_proj": [_SAYS_NOTHING, "relu", "gated-gelu", "gated-silu", "gelu"],
    "dense_act_fn": [_SAYS_NOTHING, "relu", "gelu", "gelu_new", "silu"],
    "is_gated_act": [_SAYS_NOTHING, True, False],
    **dict.fromkeys(("tie_word_embeddings", "scale_decoder_outputs", "multi_query"), [_SAYS_NOTHING, True, False]),
    **{
        "num_experts": [_SAYS_NOTHING, 4],
        "num_local_experts": [_SAYS_NOTHING, 2],
        "pad_token_id": [_SAYS_NOTHING, None, 4],
    },
}
"""Keys of which several say one thing."""
_BY_KIND = {"sliding_attention": {"rope_theta": 600.0}, "full_attention": {**_LINEAR, "rope_theta": 800.0}}
_PHI3_ROPES = [
    _SAYS_NOTHING,
    None,
    {},
    {"rope_type": "default"},
    _LONG,
    {**_LONG, "rope_type": "su", "rope_theta": 600.0},
]
_PHI3: dict[str, list[Any]] = {
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _PHI3_ROPES),
    **{"hidden_size": [32], "num_attention_heads": [4], "head_dim": [_SAYS_NOTHING, 8]},
    "partial_rotary_factor": [_SAYS_NOTHING, 1.0],
}
_SOME_OF = {
    "phi3": _PHI3,
    "gemma3_text": {"rope_parameters": [_SAYS_NOTHING, None, {}, _BY_KIND, {"full_attention": _LINEAR}]},
}
"""Values of one model's own."""


@pytest.mark.parametrize("draws", [12, pytest.param(60, marks=pytest.mark.long)])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_of_keys_that_say_one_thing_the_one_counts_that_counts_in_transformers(
    model_type: str, draws: int, tmp_path: Path
) -> None:
    """transformers' class reads them and says what it made of them, each thing by one key: the outcome is the same."""
    from transformers import AutoConfig

    rng, compared, expressed = random.Random(model_type), 0, 0
    for _ in range(draws):
        values = {**_SOME, **_SOME_OF.get(model_type, {})}
        some = {key: rng.choice(each) for key, each in values.items() if rng.random() < 0.2}
        said = {key: copy.deepcopy(value) for key, value in some.items() if value is not _SAYS_NOTHING}
        config = {
            key: value for key, value in config_of(model_type).items() if some.get(key) is not _SAYS_NOTHING
        } | said
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            meant = AutoConfig.from_pretrained(tmp_path).to_dict() | {"model_type": model_type}
        except Exception:  # whatever its validation finds
            continue
        compared += 1
        made, wanted = outcome(config), outcome(meant)
        assert made == wanted or made.startswith("refused"), said
        expressed += not made.startswith("refused")
    assert compared > draws * 2 / 3
    assert expressed > compared / 3
