"""Every field of megatron-core's configurations and of the classes around it: what it means for the function.

Fields: megatron-core 0.4 to 0.20, ``ModelParallelConfig``, ``TransformerConfig``, ``MLATransformerConfig`` and the
arguments of ``GPTModel``; Megatron-Bridge 0.1 to 0.6, ``GPTModelProvider``, ``GPTModelConfig`` and the providers of
single families; NeMo 2.0 to 2.4, ``GPTConfig`` and its families. Each is honoured by the readers, limited (refused
unless its value is one that changes nothing), or without effect on the function, with the reason
(``core_without_effect.py``). ``tests/data/megatron_fields.json`` lists them by class, and the tests look for a verdict
on each.
"""

from __future__ import annotations

from typing import Any

from export_scripts.checkpoints.nemo.core_without_effect import WITHOUT_EFFECT
from export_scripts.checkpoints.nemo.limits import Limit, is_off, is_one_of
from models.checks import quoted

_NO_CUSTOM_SCORES = "it divides scores by the root of the head's size, and nothing else is done to them"
_NO_CAPS = "it does not cap logits or scores"
_NO_ROPE_SCALING = "it does not scale the rotation"
_ALIKE = "its layers are all alike"
_NO_MULTIPLIER = "it multiplies nothing by a number"
_OF_OTHERS = "it belongs to an architecture that is not read"


def is_neutral(value: Any) -> bool:
    """Whether a factor, or each of several, multiplies by one or is not set."""
    if isinstance(value, (list, tuple)):
        return all(is_neutral(each) for each in value)
    return value in (None, 0, 1)


def _is_plain_balancing(value: Any) -> bool:
    """Whether a router's balancing is a loss of training alone: Sinkhorn's and quantiles change what is chosen."""
    kinds = value if isinstance(value, (list, tuple)) else [value]
    return all(kind in (None, "aux_loss", "seq_aux_loss", "global_aux_loss", "none") for kind in kinds)


def _is_frequency(value: Any) -> bool:
    """Whether a value says which layers have experts: a number, or a list of 0 and 1."""
    if isinstance(value, (list, tuple)):
        return all(each in (0, 1) for each in value)
    return value is None or (isinstance(value, int) and value > 0)


CORE_LIMITS: dict[str, Limit] = {
    "softmax_scale": Limit(is_off, _NO_CUSTOM_SCORES),
    "softmax_type": Limit(is_one_of(None, "vanilla"), _NO_CUSTOM_SCORES),
    "query_pre_attn_scalar": Limit(is_off, _NO_CUSTOM_SCORES),
    "sqrt_query_pre_attn_scalar": Limit(is_off, _NO_CUSTOM_SCORES),
    "attn_logit_softcapping": Limit(is_off, _NO_CAPS),
    "final_logit_softcapping": Limit(is_off, _NO_CAPS),
    "logits_soft_cap": Limit(is_off, _NO_CAPS),
    "qk_l2_norm": Limit(is_off, "it does not normalise queries and keys"),
    "attention_output_gate": Limit(is_off, "its attention has no gate"),
    "head_wise_attn_gate": Limit(is_off, "its attention has no gate"),
    "multi_latent_attention": Limit(is_off, "every head has its own keys and values"),
    "experimental_attention_variant": Limit(is_off, "it has plain attention"),
    "attention_chunk_size": Limit(is_off, "it has plain attention"),
    "attention_k_eq_v": Limit(is_off, "it has plain attention"),
    "no_rope_freq": Limit(is_off, "all its layers rotate positions, or none"),
    "nope_layer_interval": Limit(is_off, "all its layers rotate positions, or none"),
    "rotary_base_per_layer": Limit(is_off, "all its layers rotate alike"),
    "interleaved_attn_pattern": Limit(is_off, "all its layers rotate alike"),
    "rope_scaling": Limit(is_off, _NO_ROPE_SCALING),
    "scale_factor": Limit(is_neutral, _NO_ROPE_SCALING),
    "rotary_scaling_factor": Limit(is_neutral, _NO_ROPE_SCALING),
    **{
        f"yarn_{name}": Limit(is_off, f"{_NO_ROPE_SCALING}; megatron-core reads YaRN's keys beside plain rotation too")
        for name in (
            *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
            *("mscale_all_dim", "correction_range_round_to_int"),
        )
    },
    "parallel_attention": Limit(is_off, "its GPT has attention before the feed-forward"),
    "new_decoder_architecture": Limit(is_off, "its GPT has attention before the feed-forward"),
    "glu_linear_offset": Limit(is_off, "nothing is added to the feed-forward's gate"),
    "activation_func_clamp_value": Limit(is_off, "it does not clamp the feed-forward's values"),
    "swiglu_limits": Limit(is_off, "it does not clamp the feed-forward's values"),
    "heterogeneous_block_specs": Limit(is_off, _ALIKE),
    "heterogeneous_layers_config_path": Limit(is_off, _ALIKE),
    "heterogeneous_layers_config_encoded_json": Limit(is_off, _ALIKE),
    "linear_attention_freq": Limit(is_off, _ALIKE),
    "is_hybrid_model": Limit(is_off, _ALIKE),
    **{f"hybrid_{name}": Limit(is_off, _ALIKE) for name in ("override_pattern", "layer_pattern")},
    **{f"hybrid_{name}": Limit(is_off, _ALIKE) for name in ("attention_ratio", "mlp_ratio")},
    **{name: Limit(is_off, _ALIKE) for name in ("layer_types", "sliding_windows", "sliding_attention_setting")},
    "attention_other_setting": Limit(is_off, _ALIKE),
    "mtp_num_layers": Limit(is_off, "it predicts one token at a time"),
    "mtp_enabled": Limit(is_off, "it predicts one token at a time"),
    "enable_mhc_connections": Limit(is_off, "its residual is one stream"),
    "use_mup": Limit(is_off, "it does not scale embeddings and logits"),
    "mup_output_mult": Limit(is_neutral, _NO_MULTIPLIER),
    "scale_embeddings_by_hidden_size": Limit(is_off, _OF_OTHERS),
    **{f"{name}_multiplier": Limit(is_neutral, _NO_MULTIPLIER) for name in ("embedding", "attention", "residual")},
    **{f"{name}_multiplier": Limit(is_neutral, _NO_MULTIPLIER) for name in ("lm_head", "key", "ssm_in", "ssm_out")},
    **{f"attention_{name}_multiplier": Limit(is_neutral, _NO_MULTIPLIER) for name in ("in", "out")},
    **{name: Limit(is_neutral, _NO_MULTIPLIER) for name in ("mlp_multipliers", "ssm_multipliers", "logits_scaling")},
    **{
        name: Limit(is_off, _OF_OTHERS)
        for name in (
            *("global_kv_channels", "global_head_dim", "num_global_query_groups", "num_global_key_value_heads"),
            *("global_rotary_percent", "sliding_window_rope_base", "full_attention_rope_base"),
            *("full_attention_rope_partial_factor", "num_kv_shared_layers", "use_double_wide_mlp"),
            *("per_layer_embed_dim", "per_layer_embed_vocab_size", "kimi_kda_layers", "linear_attention_type"),
        )
    },
    "layer_spec": Limit(is_off, "its layers are those that megatron-core's own specifications of a GPT build"),
    "enable_gpt_oss": Limit(
        is_off, "ModelOpt sets yarn in its code then, with another original length than GPT-OSS has"
    ),
    "use_kitchen": Limit(is_off, "its weights are plain"),
    "use_kitchen_attention": Limit(is_off, "its attention is plain"),
}
"""Limits of every decoder: NeMo 2 and Megatron-Bridge have the keys as they are, NeMo 1 on top or in
``mcore_customization_config``, Megatron-LM among its arguments."""

_CHOSEN = "the experts with the highest scores are chosen"
ROUTER_LIMITS: dict[str, Limit] = {
    "moe_router_score_function": Limit(is_one_of(None, "softmax", "sigmoid"), "the router has a softmax or a sigmoid"),
    "moe_router_load_balancing_type": Limit(_is_plain_balancing, _CHOSEN),
    "moe_router_topk_limited_devices": Limit(is_off, _CHOSEN),
    "moe_router_force_load_balancing": Limit(is_off, "the router does not choose at random"),
    "moe_router_force_biased": Limit(is_off, "the router does not choose at random"),
    "moe_layer_freq": Limit(_is_frequency, "each layer has experts or one feed-forward"),
    "moe_token_dropping": Limit(is_off, "every token gets its experts"),
    "moe_expert_rank_capacity_factor": Limit(is_off, "every token gets its experts"),
    "moe_mlp_glu_interleave_size": Limit(is_off, "the feed-forward's gate is one block"),
}
"""Limits of a mixture of experts; a model that has none does not read them."""

CAPACITY = "moe_expert_capacity_factor"
"""What an expert takes, as a multiple of its share of the tokens; the router leaves out the others."""


def capacity_problem(capacity: Any, experts: int, chosen: int) -> str:
    """Return why a mixture's capacity is in the way; empty: no token can be left out.

    megatron-core takes a negative one for none. Each expert can take every token from ``experts / chosen`` on.
    """
    if capacity is None or (isinstance(capacity, (int, float)) and (capacity < 0 or capacity * chosen >= experts)):
        return ""
    return (
        f"{CAPACITY}: {quoted(capacity)}  (every token gets its experts, and megatron-core leaves out tokens; "
        "with null there the model is converted as one that leaves out none)"
    )


_OF_MIXTURES = (
    *("moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_latent_size", "moe_apply_probs_on_input"),
)
OF_HYBRIDS = (
    *("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "mamba_chunk_size"),
    "mtp_hybrid_override_pattern",
)
OF_DELTA = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
OF_FALCON_H1 = (
    *("falconh1_ratio", "use_mamba", "use_attention", "use_mlp", "D_has_hdim", "d_conv", "expand", "conv_bias"),
    *("chunk_size", "rmsnorm", "norm_before_gate"),
)
OF_LATENT = (
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
    "mtp_use_repeated_layer",
)
"""What latent attention alone reads, and the predictors that it is trained with."""
_OF_LAYERS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("layernorm_epsilon", "layernorm_zero_centered_gamma", "normalization", "add_bias_linear", "add_qkv_bias"),
    *("gated_linear_unit", "activation_func", "bias_activation_fusion", "bias_gelu_fusion", "use_te_activation_func"),
    *("apply_residual_connection_post_layernorm", "rotary_interleaved", "window_size", "window_attn_skip_freq"),
    "qk_layernorm",
    *("num_moe_experts", CAPACITY),
)
_OF_THE_WHOLE = (
    *("position_embedding_type", "rotary_base", "rotary_percent", "rope_scaling_factor"),
    *("seq_len_interpolation_factor", "seq_length", "max_sequence_length", "share_embeddings_and_output_weights"),
    *("low_freq_factor", "high_freq_factor", "old_context_len", "transformer_layer_spec", "_target_", "transformer"),
    *("max_position_embeddings", "mamba_stack_spec", "hybrid_stack_spec", "falconh1_stack_spec"),
)
CORE_HONOURED = frozenset(
    {*_OF_LAYERS, *_OF_MIXTURES, *OF_HYBRIDS, *OF_DELTA, *OF_FALCON_H1, *OF_LATENT, *_OF_THE_WHOLE}
)
"""What the readers honour; those of GPT refuse some that only the Llama family has, as ``window_size``."""

OF_LAYERS = frozenset(_OF_LAYERS)
"""Of those, what NeMo 1 says in words of its own: in ``mcore_customization_config`` they would overrule it."""

CORE_KNOWN = frozenset(
    {*CORE_LIMITS, *ROUTER_LIMITS, *CORE_HONOURED, *(name for names in WITHOUT_EFFECT.values() for name in names)}
)
"""Every field that has a verdict."""
CARRIED = (
    *(*CORE_LIMITS, *ROUTER_LIMITS, CAPACITY, *_OF_MIXTURES, *OF_HYBRIDS, *OF_DELTA, *OF_LATENT),
    "window_attn_skip_freq",
)
"""What the readers of NeMo 2, Megatron-Bridge and Megatron-LM hand over under megatron-core's own names."""
