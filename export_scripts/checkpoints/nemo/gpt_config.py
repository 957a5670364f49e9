"""What a NeMo configuration says of the model: what FasterTransformer's GPT cannot express, and the dimensions.

Keys and defaults: NeMo 1.23, ``MegatronGPTModel`` and ``megatron_gpt_config.yaml``; key names of earlier versions
that differ are read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.nemo.core_fields import CORE_KNOWN, CORE_LIMITS, OF_LAYERS
from export_scripts.checkpoints.nemo.known_keys import GPT_KNOWN, NEMO1_LIMITS
from export_scripts.checkpoints.nemo.limits import (
    Limit,
    is_off,
    is_on,
    is_one_of,
    problems,
    remark_on,
    unknown_keys,
)
from export_scripts.weights.remarks import EXACT_GELU
from export_scripts.weights.schema import ModelDims
from export_scripts.weights.values import epsilon, number, positive
from handover.errors import CheckpointError
from models.checks import shown

CUSTOMIZATION = "mcore_customization_config"
YARN = "yarn"
"""``position_embedding_type`` of a rotation that yarn scales."""
_LIMITS: dict[str, Limit] = {
    **NEMO1_LIMITS,
    "position_embedding_type": Limit(
        is_one_of("learned_absolute", "rope", "alibi"), "it has learned absolute positions, ALiBi or rotation"
    ),
    "activation": Limit(is_one_of("gelu"), "its feed-forward has GELU without a gate"),
    "normalization": Limit(
        is_one_of("layernorm", "low_precision_layernorm", "layernorm1p"), "it has layer norm, no other norm"
    ),
    "transformer_block_type": Limit(is_one_of("pre_ln"), "it has layer norm before each block"),
    "attention_type": Limit(is_one_of("multihead"), "every head has its own keys and values"),
    "headscale": Limit(is_off, "it does not scale heads"),
    "normalize_attention_scores": Limit(is_on, "it divides scores by the root of the head's size"),
    "apply_residual_connection_post_layernorm": Limit(is_off, "its residual is taken before the layer norm"),
    "qk_layernorm": Limit(is_off, "it does not normalise queries and keys"),
    "window_size": Limit(is_off, "every token sees all tokens before it"),
    "num_moe_experts": Limit(is_one_of(None, 0, 1), "mixtures of experts have another layout"),
    "virtual_pipeline_model_parallel_size": Limit(is_one_of(None, 1), "interleaved pipeline stages are not read"),
}

# FasterTransformer's GPT-NeoX has rotation, and fewer choices.
_ROTARY_LIMITS: dict[str, Limit] = {
    "rotary_base": Limit(is_one_of(None, 10000), "it rotates with a base of 10000"),
    "seq_len_interpolation_factor": Limit(is_one_of(None, 1), "it does not interpolate positions"),
    "rotary_interleaved": Limit(is_off, "it rotates halves, not pairs"),
    "use_rope_scaling": Limit(is_off, "it does not scale the rotation"),
    "layernorm_epsilon": Limit(is_one_of(1e-5), "its GPT-NeoX computes layer norms with 1e-5"),
}


def is_rotary(config: Mapping[str, Any]) -> bool:
    """Whether positions are given by rotation: then FasterTransformer's GPT-NeoX or a Llama expresses the model."""
    return config.get("position_embedding_type") in ("rope", YARN)


def has_zero_centred_norms(config: Mapping[str, Any]) -> bool:
    """Whether norms are stored less one: NeMo's LayerNorm1P, or megatron-core's key for the same."""
    is_core = bool(config.get("mcore_gpt")) and bool(config.get("layernorm_zero_centered_gamma"))
    return config.get("normalization") == "layernorm1p" or is_core


def check_expressible(config: Mapping[str, Any]) -> None:
    """Refuse an architecture that FasterTransformer's GPT cannot express.

    Raises:
        CheckpointError: naming every key in the way, its value and the reason.
    """
    model_class = str(config.get("target", "")).rpartition(".")[2]
    if model_class and ("GPT" not in model_class or "Prompt" in model_class):
        raise CheckpointError(f"the checkpoint is a {model_class}, not a GPT", "export=gpt3/... converts GPT models")
    if found := _problems(config):
        raise CheckpointError(
            "FasterTransformer's GPT cannot express this checkpoint\n  " + "\n  ".join(found),
            f"the keys are those of {CONFIG_FILE}",
        )


def is_beyond_gpt(config: Mapping[str, Any]) -> bool:
    """Whether a model with rotary positions is more than FasterTransformer's GPT-NeoX: a Llama or a relative."""
    return is_rotary(config) and bool(_problems(config))


def _problems(config: Mapping[str, Any]) -> list[str]:
    """List what FasterTransformer's GPT has not, one line each."""
    found = problems(config, _LIMITS | _ROTARY_LIMITS if is_rotary(config) else _LIMITS)
    found += problems(customization(config), CORE_LIMITS, f"{CUSTOMIZATION}.") + overruled_problems(config)
    hidden, heads, channels = (config.get(key) for key in ("hidden_size", "num_attention_heads", "kv_channels"))
    is_known = channels is not None and isinstance(hidden, int) and isinstance(heads, int)
    if is_known and channels != int(hidden or 0) // int(heads or 1):
        found.append(f"kv_channels: {shown(channels)}  (a head's size is hidden_size / num_attention_heads)")
    return found


def heads_per_group(config: Mapping[str, Any]) -> int:
    """Count the heads that share one key and value; 1: every head has its own.

    Raises:
        CheckpointError: the groups do not divide the heads.
    """
    groups = config.get("num_query_groups")
    if groups is None:
        return 1
    heads, groups = _positive(config, "num_attention_heads"), _positive(config, "num_query_groups")
    if heads % groups:
        raise CheckpointError(f"num_query_groups {groups} does not divide num_attention_heads {heads}")
    return heads // groups


def customization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said to megatron-core past NeMo."""
    section = config.get(CUSTOMIZATION)
    return section if isinstance(section, Mapping) else {}


def overruled_problems(config: Mapping[str, Any]) -> list[str]:
    """List what is said to megatron-core otherwise than to NeMo, one line each: NeMo sets it last."""
    return [
        f"{CUSTOMIZATION}.{key}: {shown(value)}  (the model is read by NeMo's own keys, which say otherwise)"
        for key, value in customization(config).items()
        if key in OF_LAYERS and value != config.get(key) and (value or config.get(key))
    ]


def key_remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Name the keys of NeMo's ``model_config.yaml`` that are set and not known, in one line."""
    unknown = unknown_keys(config, {*GPT_KNOWN, *_LIMITS, *_ROTARY_LIMITS})
    unknown += unknown_keys(customization(config), CORE_KNOWN, f"{CUSTOMIZATION}.")
    if not str(config.get("target") or "nemo.").startswith("nemo."):
        unknown.append(f"target: {shown(config['target'])}")
    return remark_on(unknown, CONFIG_FILE)


def has_exact_gelu(config: Mapping[str, Any]) -> bool:
    """Whether the feed-forward computes the exact GELU.

    NeMo's ``ParallelMLP`` computes the tanh form where bias and activation are fused or ``openai_gelu`` is set, and
    the exact one elsewhere.
    """
    is_fused = config.get("bias_activation_fusion", config.get("bias_gelu_fusion", True))
    return not config.get("openai_gelu") and (not is_fused or bool(config.get("onnx_safe")))


def remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """List what is expressed only nearly, one line each: FasterTransformer has the tanh form of GELU only."""
    return (EXACT_GELU,) if has_exact_gelu(config) else ()


def read_dims(config: Mapping[str, Any], vocab_size: int) -> ModelDims:
    """Read the dimensions.

    Args:
        config: of the checkpoint.
        vocab_size: rows of the embedding: the configuration does not know the padding.

    Raises:
        CheckpointError: a key is missing or is not a positive number.
    """
    hidden = _positive(config, "hidden_size")
    heads = _positive(config, "num_attention_heads")
    if hidden % heads:
        raise CheckpointError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    position = config.get("position_embedding_type")
    return ModelDims(
        head_num=heads,
        size_per_head=hidden // heads,
        inter_size=_positive(config, "ffn_hidden_size", default=4 * hidden),
        num_layer=_positive(config, "num_layers"),
        max_pos_seq_len=_positive(config, "max_position_embeddings", default=config.get("encoder_seq_length")),
        vocab_size=vocab_size,
        layernorm_eps=epsilon(config.get("layernorm_epsilon", 1e-5), "model_config.yaml: layernorm_epsilon"),
        has_untied_head=not config.get("share_embeddings_and_output_weights", True),
        has_positional_encoding=position in (None, "learned_absolute"),
        use_attention_linear_bias=position == "alibi",
        rotary_embedding=_rotary_width(config, hidden // heads) if is_rotary(config) else 0,
    )


def _rotary_width(config: Mapping[str, Any], size_per_head: int) -> int:
    """Count the elements of a head that are rotated."""
    width = int(size_per_head * number(config.get("rotary_percentage", 1.0), "model_config.yaml: rotary_percentage"))
    if width < 2 or width % 2:
        raise CheckpointError(
            f"rotary_percentage rotates {width} of a head's {size_per_head} elements, not pairs of them"
        )
    return width


def _positive(config: Mapping[str, Any], key: str, default: Any = None) -> int:
    value = config.get(key)
    return positive(default if value is None else value, f"model_config.yaml: {key}", "is it a GPT checkpoint?")
