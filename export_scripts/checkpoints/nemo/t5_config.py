"""What a NeMo configuration says of a T5: what FasterTransformer's T5 cannot express, and the dimensions.

Keys and defaults: NeMo 1.23, ``megatron_t5_config.yaml``, ``megatron_model_base_config.yaml`` (one section a side) and
``token_level_encoder_decoder.py``; before the sections their keys stood on top, for both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from export_scripts.checkpoints.nemo.config_file import CONFIG_FILE
from export_scripts.checkpoints.nemo.known_keys import T5_KNOWN, T5_LIMITS
from export_scripts.checkpoints.nemo.limits import remark_on, unknown_keys
from export_scripts.weights.remarks import EXACT_GELU, ShardRemark
from export_scripts.weights.schema import T5Dims
from export_scripts.weights.values import epsilon, positive
from ft_format.families.t5 import LAYERNORM_EPS, MAX_DISTANCE
from handover.errors import CheckpointError
from models.checks import quoted, shown

Config = Mapping[str, Any]
Limit = tuple[str, Callable[[Any], bool], str]
"""A key, the test of a value that is fine, and what FasterTransformer's T5 has instead."""

SIDES = ("encoder", "decoder")
_ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "geglu": "geglu",
    "reglu": "reglu",
    "swiglu": "gated-silu",
    "fast-geglu": "geglu",
    "fast-reglu": "reglu",
    "fast-swiglu": "gated-silu",
}
"""FasterTransformer's ``feed_forward_proj`` by NeMo's ``activation``."""
_WITH_BIAS = ("layernorm", "low_precision_layernorm", "layernorm1p")
# What both sides must have alike: FasterTransformer's converter demands it, and its table of positions is one for both.
_ALIKE = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "activation",
    "normalization",
    "position_embedding_type",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "layernorm_epsilon",
    "megatron_legacy",
)
_DEFAULTS = {
    "activation": "gelu",
    "normalization": "layernorm",
    "position_embedding_type": "learned_absolute",
    "layernorm_epsilon": 1e-5,
    "megatron_legacy": False,
}

_LIMITS: tuple[Limit, ...] = (
    ("arch", lambda v: v in (None, "transformer"), "encoder and decoder are transformers"),
    ("activation", lambda v: v in (None, *_ACTIVATIONS), f"it has {', '.join(_ACTIVATIONS)}"),
    ("normalization", lambda v: v in (None, *_WITH_BIAS, "rmsnorm"), "it has layer norm and RMS norm"),
    (
        "position_embedding_type",
        lambda v: v in (None, "learned_absolute", "relative"),
        "it has learned absolute and T5's relative positions",
    ),
    ("transformer_block_type", lambda v: v in (None, "pre_ln"), "it has a norm before each block"),
    ("attention_type", lambda v: v in (None, "multihead"), "every head has its own keys and values"),
    ("headscale", lambda v: not v, "it does not scale heads"),
    ("num_moe_experts", lambda v: v in (None, 0, 1), "mixtures of experts have another layout"),
    ("num_self_attention_per_cross_attention", lambda v: v in (None, 1), "each layer looks at the encoder"),
    ("mcore_t5", lambda v: not v, "megatron-core's T5 has other keys"),
    ("share_token_embeddings", lambda v: v in (None, True), "encoder and decoder share one embedding"),
)
_DISTANCE = "relative_attention_max_distance"
_RELATIVE_LIMITS: tuple[Limit, ...] = (
    ("relative_position_bias_self_attention_only", lambda v: v in (None, True), "it has none towards the encoder"),
)


def side_config(config: Config, side: str) -> dict[str, Any]:
    """Return the keys of one side: its section's, then the top's, then NeMo's defaults."""
    section = config.get(side) or {}
    if not isinstance(section, Mapping):
        raise CheckpointError(f"model_config.yaml: {side} is {quoted(section)}, not a section")
    own = {key: value for key, value in section.items() if value is not None}
    return {**_DEFAULTS, **config, **own}


def check_expressible(config: Config) -> None:
    """Refuse an architecture that FasterTransformer's T5 cannot express.

    Raises:
        CheckpointError: naming every key in the way, its value and the reason.
    """
    sides = {side: side_config(config, side) for side in SIDES}
    problems = [
        f"{side}.{key}: {shown(values[key])}  ({reason})"
        for side, values in sides.items()
        for key, is_fine, reason in _limits(values)
        if key in values and not is_fine(values[key])
    ]
    encoder, decoder = sides.values()
    problems += [
        f"encoder.{key}: {shown(ours)}, decoder.{key}: {shown(theirs)}  (both sides must be alike)"
        for key, ours, theirs in ((key, encoder.get(key), decoder.get(key)) for key in _ALIKE)
        if ours != theirs
    ]
    if problems:
        raise CheckpointError(
            "FasterTransformer's T5 cannot express this checkpoint\n  " + "\n  ".join(dict.fromkeys(problems)),
            f"the keys are those of {CONFIG_FILE}",
        )


def _limits(values: Config) -> tuple[Limit, ...]:
    """Return what is demanded of a side: more of one with relative positions, and by its norm."""
    has_bias = values["normalization"] in _WITH_BIAS
    by_norm: tuple[Limit, ...]
    if has_bias:
        by_norm = (("normalize_attention_scores", lambda v: v in (None, True), "with layer norm it divides scores"),)
    else:
        by_norm = (
            ("bias", lambda v: v is False, "with RMS norm it has no bias"),
            ("tokens_head_bias", lambda v: v is False, "with RMS norm it has no bias"),
            ("normalize_attention_scores", lambda v: v is False, "with RMS norm it does not divide scores"),
        )
    is_relative = values["position_embedding_type"] == "relative"
    more = tuple((key, limit.is_fine, limit.reason) for key, limit in T5_LIMITS.items())
    return (*_LIMITS, *by_norm, *(_RELATIVE_LIMITS if is_relative else ()), *more)


def exact_gelu(config: Config) -> str:
    """Name the feed-forward's function in transformers' words where it is the exact GELU; empty: it is not."""
    encoder = side_config(config, "encoder")
    is_fused = encoder.get("bias_activation_fusion", True) and not encoder.get("onnx_safe")
    if "ge" not in encoder["activation"] or encoder.get("openai_gelu") or is_fused:
        return ""
    return "gelu" if encoder["activation"] == "gelu" else "gated-gelu_python"


def remarks(config: Config) -> tuple[str, ...]:
    """List what is expressed only nearly, one line each."""
    encoder, found = side_config(config, "encoder"), []
    epsilon = _epsilon(encoder)
    if epsilon != LAYERNORM_EPS:
        found.append(
            ShardRemark(
                f"trained with layernorm_epsilon {epsilon:g}; FasterTransformer's T5 computes with {LAYERNORM_EPS:g}"
            )
        )
    if exact_gelu(config):
        found.append(EXACT_GELU)
    return (*found, *_key_remarks(config))


def _key_remarks(config: Config) -> tuple[str, ...]:
    """Name the keys that are set and not known, on top and of both sides, in one line."""
    known = {*T5_KNOWN, *T5_LIMITS, *_DEFAULTS, _DISTANCE, *(key for key, _, _ in (*_LIMITS, *_RELATIVE_LIMITS))}
    unknown = unknown_keys(config, known)
    for side in SIDES:
        unknown += unknown_keys(config.get(side) or {}, known, f"{side}.")
    return remark_on(unknown, CONFIG_FILE)


def biases(config: Config) -> dict[str, bool]:
    """Read which biases there are, by FasterTransformer's names; ``bias`` says nothing of norms."""
    said = {"shared.bias": config.get("tokens_head_bias")}
    for side in SIDES:
        has_bias = side_config(config, side).get("bias")
        said |= dict.fromkeys((f"{side}.*Attention.*.bias", f"{side}.*Dense.*.bias"), has_bias)
    return {pattern: bool(has) for pattern, has in said.items() if has is not None}


def read_dims(config: Config, vocab_size: int) -> T5Dims:
    """Read the dimensions; CheckpointError: a key is missing or is not a positive number."""
    encoder, decoder = (side_config(config, side) for side in SIDES)
    hidden, heads = _positive(encoder, "hidden_size"), _positive(encoder, "num_attention_heads")
    is_relative = encoder["position_embedding_type"] == "relative"
    return T5Dims(
        head_num=heads,
        size_per_head=_positive(encoder, "kv_channels", default=hidden // heads),
        d_model=hidden,
        inter_size=_positive(encoder, "ffn_hidden_size", default=4 * hidden),
        encoder_layer_num=_positive(encoder, "num_layers"),
        decoder_layer_num=_positive(decoder, "num_layers"),
        vocab_size=vocab_size,
        position_num=_position_num(encoder, is_relative),
        has_relative_positions=is_relative,
        has_bias=encoder["normalization"] in _WITH_BIAS,
        activation=_ACTIVATIONS[encoder["activation"]],
        layernorm_eps=_epsilon(encoder),
        max_distance=_positive(encoder, _DISTANCE, MAX_DISTANCE) if is_relative else MAX_DISTANCE,
    )


def beyond(dims: T5Dims) -> tuple[str, ...]:
    """List what FasterTransformer's T5 cannot express and transformers' can, one line each."""
    if dims.max_distance == MAX_DISTANCE:
        return ()
    return (f"encoder.{_DISTANCE}: {dims.max_distance}  (it computes with {MAX_DISTANCE})",)


def _position_num(encoder: Config, is_relative: bool) -> int:
    """Buckets, or rows of the table; its key may still refer to seq_length (``${.seq_length}``)."""
    if is_relative:
        return _positive(encoder, "relative_attention_num_buckets")
    is_reference = "seq_length" in str(encoder.get("max_position_embeddings"))
    return _positive(encoder, "seq_length" if is_reference else "max_position_embeddings")


def _positive(config: Config, key: str, default: Any = None) -> int:
    value = config.get(key)
    return positive(default if value is None else value, f"model_config.yaml: {key}", "is it a T5 checkpoint?")


def _epsilon(side: Config) -> float:
    return epsilon(side["layernorm_epsilon"], "model_config.yaml: layernorm_epsilon")
