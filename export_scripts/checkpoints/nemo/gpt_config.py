"""What a NeMo configuration says of the model: what FasterTransformer's GPT cannot express, and the dimensions.

Keys and defaults: NeMo 1.23, ``MegatronGPTModel`` and ``megatron_gpt_config.yaml``; key names of earlier versions
that differ are read as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from export_scripts.weights.schema import ModelDims
from export_scripts.weights.values import number, positive, shown
from handover.errors import CheckpointError


@dataclass(frozen=True)
class _Limit:
    """A key whose value FasterTransformer's GPT cannot follow.

    Attributes:
        is_fine: of the key's value; a missing key is always fine.
        reason: what FasterTransformer has instead.
    """

    is_fine: Callable[[Any], bool]
    reason: str


def _is_off(value: Any) -> bool:
    return not value


def _is_on(value: Any) -> bool:
    return value is None or bool(value)


def _is_one_of(*legal: Any) -> Callable[[Any], bool]:
    return lambda value: value in legal


_LIMITS: dict[str, _Limit] = {
    "position_embedding_type": _Limit(
        _is_one_of("learned_absolute", "rope", "alibi"), "it has learned absolute positions, ALiBi or rotation"
    ),
    "activation": _Limit(_is_one_of("gelu"), "its feed-forward has GELU without a gate"),
    "normalization": _Limit(
        _is_one_of("layernorm", "low_precision_layernorm", "layernorm1p"), "it has layer norm, no other norm"
    ),
    "transformer_block_type": _Limit(_is_one_of("pre_ln"), "it has layer norm before each block"),
    "attention_type": _Limit(_is_one_of("multihead"), "every head has its own keys and values"),
    "headscale": _Limit(_is_off, "it does not scale heads"),
    "normalize_attention_scores": _Limit(_is_on, "it divides scores by the root of the head's size"),
    "apply_residual_connection_post_layernorm": _Limit(_is_off, "its residual is taken before the layer norm"),
    "qk_layernorm": _Limit(_is_off, "it does not normalise queries and keys"),
    "window_size": _Limit(_is_off, "every token sees all tokens before it"),
    "num_moe_experts": _Limit(_is_one_of(None, 0, 1), "mixtures of experts have another layout"),
    "virtual_pipeline_model_parallel_size": _Limit(_is_one_of(None, 1), "interleaved pipeline stages are not read"),
}

# FasterTransformer's GPT-NeoX has rotation, and fewer choices.
_ROTARY_LIMITS: dict[str, _Limit] = {
    "rotary_base": _Limit(_is_one_of(None, 10000), "it rotates with a base of 10000"),
    "seq_len_interpolation_factor": _Limit(_is_one_of(None, 1), "it does not interpolate positions"),
    "rotary_interleaved": _Limit(_is_off, "it rotates halves, not pairs"),
    "use_rope_scaling": _Limit(_is_off, "it does not scale the rotation"),
    "layernorm_epsilon": _Limit(_is_one_of(1e-5), "its GPT-NeoX computes layer norms with 1e-5"),
}


def is_rotary(config: Mapping[str, Any]) -> bool:
    """Whether positions are given by rotation: then FasterTransformer's GPT-NeoX expresses the model."""
    return config.get("position_embedding_type") == "rope"


def check_expressible(config: Mapping[str, Any]) -> None:
    """Refuse an architecture that FasterTransformer's GPT cannot express.

    Raises:
        CheckpointError: naming every key in the way, its value and the reason.
    """
    model_class = str(config.get("target", "")).rpartition(".")[2]
    if model_class and ("GPT" not in model_class or "Prompt" in model_class):
        raise CheckpointError(f"the checkpoint is a {model_class}, not a GPT", "export=gpt3/... converts GPT models")
    problems = [
        f"{key}: {shown(config[key])}  ({limit.reason})"
        for key, limit in (_LIMITS | _ROTARY_LIMITS if is_rotary(config) else _LIMITS).items()
        if key in config and not limit.is_fine(config[key])
    ]
    hidden, heads, channels = (config.get(key) for key in ("hidden_size", "num_attention_heads", "kv_channels"))
    is_known = channels is not None and isinstance(hidden, int) and isinstance(heads, int)
    if is_known and channels != int(hidden or 0) // int(heads or 1):
        problems.append(f"kv_channels: {shown(channels)}  (a head's size is hidden_size / num_attention_heads)")
    if problems:
        raise CheckpointError(
            "FasterTransformer's GPT cannot express this checkpoint\n  " + "\n  ".join(problems),
            "the keys are those of model_config.yaml",
        )


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


def remarks(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Say what is expressed only nearly, one line each.

    NeMo's ``ParallelMLP`` computes the tanh form of GELU where bias and activation are fused or ``openai_gelu`` is
    set, and the exact one elsewhere; FasterTransformer has the tanh form only.
    """
    is_fused = config.get("bias_activation_fusion", config.get("bias_gelu_fusion", True))
    if config.get("openai_gelu") or (is_fused and not config.get("onnx_safe")):
        return ()
    return ("trained with the exact GELU; FasterTransformer computes its tanh form, which differs by at most 5e-4",)


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
        layernorm_eps=number(config.get("layernorm_epsilon", 1e-5), "model_config.yaml: layernorm_epsilon"),
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
