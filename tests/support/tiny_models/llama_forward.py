"""What NeMo computes from the files of a Llama-like model, in float64, after Megatron-LM's and NeMo's modules.

Every training rank's arithmetic is done on its own part and summed, as ColumnParallelLinear and RowParallelLinear do:
megatron/core/transformer/{attention,mlp,dot_product_attention}.py, moe/router.py, models/common/embeddings; NeMo's
mcore_model_customize, EmbeddingScalingMixin, gemma2_modules.py and modules/common/megatron/mlp.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
Weights = Mapping[str, Array]


@dataclass(frozen=True)
class Rules:
    """What a configuration says of the computation, whichever of NeMo's forms it has."""

    heads: int
    groups: int
    size: int
    layers: int
    epsilon: float
    is_rms: bool
    norm_offset: float
    activation: str
    is_gated: bool
    rotary: float
    base: float
    stretch: float = 1.0
    scaling: tuple[float, float, float, float] | None = None
    window: int | None = None
    is_gemma2: bool = False
    query_scalar: float | None = None
    attention_cap: float | None = None
    final_cap: float | None = None
    embedding_scale: float = 1.0
    active_experts: int = 0


def rules_of_nemo1(config: Mapping[str, Any]) -> Rules:
    """Read ``model_config.yaml`` as MegatronGPTModel.build_transformer_config and model_provider_func do."""
    custom = config.get("mcore_customization_config", {})
    is_scaled = config.get("scale_positional_embedding", False)
    bounds = (config.get("low_freq_factor", 1), config.get("high_freq_factor", 4), config.get("old_context_len", 8192))
    kind = config["normalization"]
    is_centred = kind == "layernorm1p" or config.get("layernorm_zero_centered_gamma", False)
    activation = config["activation"].removeprefix("fast-")
    tanh = config.get("openai_gelu") or config.get("bias_activation_fusion")
    names = {"swiglu": "silu", "geglu": "tanh" if tanh else "erf", "gelu": "tanh" if tanh else "erf"}
    return Rules(
        heads=config["num_attention_heads"],
        groups=config.get("num_query_groups") or config["num_attention_heads"],
        size=config.get("kv_channels") or config["hidden_size"] // config["num_attention_heads"],
        layers=config["num_layers"],
        epsilon=config["layernorm_epsilon"],
        is_rms=kind == "rmsnorm",
        norm_offset=float(is_centred),
        activation=names.get(activation, activation),
        is_gated=activation.endswith("glu"),
        rotary=config.get("rotary_percentage", 1.0),
        base=config.get("rotary_base", 10000),
        stretch=config.get("seq_len_interpolation_factor") or 1.0,
        scaling=(config.get("scale_factor", 8), *bounds) if is_scaled else None,
        window=(config.get("window_size") or [None])[0],
        is_gemma2="gemma2" in config.get("name", ""),
        query_scalar=custom.get("query_pre_attn_scalar"),
        attention_cap=custom.get("attn_logit_softcapping"),
        final_cap=custom.get("final_logit_softcapping"),
        embedding_scale=config["hidden_size"] ** 0.5 if config.get("apply_embedding_scaling") else 1.0,
        active_experts=config.get("moe_router_topk", 0) if config.get("num_moe_experts") else 0,
    )


def rules_of_nemo2(model: Mapping[str, Any]) -> Rules:
    """Read ``model.yaml`` as the dataclass named by its ``_target_`` does; Gemma's classes scale the embedding."""
    config, target = model["config"], model["config"]["_target_"]
    function = config["activation_func"]["_target_"].rpartition(".")[2]
    names = {"openai_gelu": "tanh", "gelu": "tanh" if config["bias_activation_fusion"] else "erf"}
    bounds = ("scale_factor", "low_freq_factor", "high_freq_factor", "old_context_len")
    return Rules(
        heads=config["num_attention_heads"],
        groups=config["num_query_groups"],
        size=config["kv_channels"],
        layers=config["num_layers"],
        epsilon=config["layernorm_epsilon"],
        is_rms=config["normalization"] == "RMSNorm",
        norm_offset=float(config["layernorm_zero_centered_gamma"]),
        activation=names.get(function, function.replace("squared_relu", "squared-relu")),
        is_gated=config["gated_linear_unit"],
        rotary=config["rotary_percent"],
        base=config["rotary_base"],
        stretch=config["seq_len_interpolation_factor"] or 1.0,
        scaling=tuple(config[name] for name in bounds) if "scale_factor" in config else None,  # type: ignore[arg-type]
        window=(config["window_size"] or [None])[0],
        is_gemma2="Gemma2" in target,
        query_scalar=config.get("query_pre_attn_scalar"),
        attention_cap=config.get("attn_logit_softcapping"),
        final_cap=config.get("final_logit_softcapping"),
        embedding_scale=config["hidden_size"] ** 0.5 if "Gemma" in target else 1.0,
        active_experts=config.get("moe_router_topk", 0),
    )


def forward(ranks: list[Weights], rules: Rules, ids: Array) -> Array:
    """Compute logits [batch, length, padded vocabulary] from the parts of all tensor ranks.

    Args:
        ranks: weights of each rank in megatron-core's names (Transformer Engine's specification), layers from 0.
        rules: of the configuration.
        ids: [batch, length].
    """
    first = ranks[0]
    words = np.concatenate([rank["embedding.word_embeddings.weight"] for rank in ranks])
    x = words[ids] * rules.embedding_scale
    for layer in range(rules.layers):
        name = f"decoder.layers.{layer}."
        y = _norm(x, first, f"{name}self_attention.linear_qkv.layer_norm_", rules)
        out = sum(_attention(y, rank, name, rules, len(ranks), layer) for rank in ranks)
        out = out + first.get(f"{name}self_attention.linear_proj.bias", 0)
        x = x + _after(out, first, f"{name}self_attention.linear_proj.post_layernorm.", rules)
        if rules.active_experts:
            y = _norm(x, first, f"{name}pre_mlp_layernorm.", rules)
            out = sum(_experts(y, rank, name, rules) for rank in ranks)
        else:
            y = _norm(x, first, f"{name}mlp.linear_fc1.layer_norm_", rules)
            out = sum(_feed_forward(y, rank, f"{name}mlp.", rules) for rank in ranks)
        out = out + first.get(f"{name}mlp.linear_fc2.bias", 0)
        x = x + _after(out, first, f"{name}mlp.linear_fc2.post_layernorm.", rules)
    x = _norm(x, first, "decoder.final_layernorm.", rules)
    head = "output_layer.weight" if "output_layer.weight" in first else "embedding.word_embeddings.weight"
    return _capped(x @ np.concatenate([rank[head] for rank in ranks]).T, rules.final_cap)


def _capped(x: Array, cap: float | None) -> Array:
    return cap * np.tanh(x / cap) if cap else x


def _norm(x: Array, weights: Weights, prefix: str, rules: Rules) -> Array:
    centred = x if rules.is_rms else x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + rules.epsilon)
    return scaled * (weights[f"{prefix}weight"] + rules.norm_offset) + weights.get(f"{prefix}bias", 0)


def _after(x: Array, weights: Weights, prefix: str, rules: Rules) -> Array:
    """Gemma 2's norm after a projection."""
    return _norm(x, weights, prefix, rules) if f"{prefix}weight" in weights else x


def _linear(x: Array, weights: Weights, name: str) -> Array:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def _attention(y: Array, weights: Weights, name: str, rules: Rules, ranks: int, layer: int) -> Array:
    """One rank's heads and its columns of the output projection: megatron-core's SelfAttention."""
    batch, length, _ = y.shape
    groups, per_group = rules.groups // ranks, rules.heads // rules.groups
    mixed = _linear(y, weights, f"{name}self_attention.linear_qkv")
    mixed = mixed.reshape(batch, length, groups, per_group + 2, rules.size)
    q, k, v = mixed[..., :per_group, :], mixed[..., per_group, :], mixed[..., per_group + 1, :]
    if f"{name}self_attention.q_layernorm.weight" in weights:
        q = _norm(q, weights, f"{name}self_attention.q_layernorm.", rules)
        k = _norm(k, weights, f"{name}self_attention.k_layernorm.", rules)
    q, k = _rotated(q, rules), _rotated(k, rules)
    scale = 1 / math.sqrt(rules.query_scalar or rules.size)
    scores = np.einsum("bqghd,bkgd->bghqk", q, k) * scale
    scores = _capped(scores, rules.attention_cap) + _mask(length, rules, layer)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    context = np.einsum("bghqk,bkgd->bqghd", scores / scores.sum(-1, keepdims=True), v)
    context = context.reshape(batch, length, -1)
    return np.asarray(context @ weights[f"{name}self_attention.linear_proj.weight"].T)


def _mask(length: int, rules: Rules, layer: int) -> Array:
    """Causal, and a window where there is one; Gemma 2 has it in its layers 1, 3, ... counted from 1.

    transformers' ``sliding_window`` counts the token itself, Transformer Engine's ``window_size[0]`` does not: NeMo's
    importers copy the number, so that transformers' meaning is the checkpoint's.
    """
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    is_seen = distance >= 0
    if rules.window and not (rules.is_gemma2 and layer % 2):
        is_seen &= distance < rules.window
    return np.where(is_seen, 0.0, -np.inf)


def _rotated(x: Array, rules: Rules) -> Array:
    """RotaryEmbedding and apply_rotary_pos_emb, not interleaved; x is [batch, length, ..., size]."""
    rotary = int(rules.size * rules.rotary)
    frequencies = 1.0 / rules.base ** (np.arange(0, rotary, 2) / rotary)
    if rules.scaling:
        frequencies = _llama3(frequencies, *rules.scaling)
    angles = np.outer(np.arange(x.shape[1]) / rules.stretch, frequencies)
    angles = np.concatenate([angles, angles], -1).reshape(1, x.shape[1], *([1] * (x.ndim - 3)), rotary)
    turned, rest = x[..., :rotary], x[..., rotary:]
    half = np.concatenate([-turned[..., rotary // 2 :], turned[..., : rotary // 2]], -1)
    return np.concatenate([turned * np.cos(angles) + half * np.sin(angles), rest], -1)


def _llama3(frequencies: Array, factor: float, low: float, high: float, context: float) -> Array:
    """NeMo's apply_rope_scaling."""
    lengths = 2 * math.pi / frequencies
    smooth = (context / lengths - low) / (high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = np.where(lengths > context / low, frequencies / factor, frequencies)
    return np.where((lengths >= context / high) & (lengths <= context / low), between, scaled)


def _activation(name: str) -> Callable[[Array], Array]:
    return {
        "silu": lambda z: z / (1 + np.exp(-z)),
        "tanh": lambda z: 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
        "erf": lambda z: 0.5 * z * (1 + torch.erf(torch.from_numpy(z / np.sqrt(2))).numpy()),
        "reglu": lambda z: np.maximum(z, 0),
        "squared-relu": lambda z: np.maximum(z, 0) ** 2,
    }[name]


def _feed_forward(y: Array, weights: Weights, name: str, rules: Rules) -> Array:
    """One rank's features; the rows of its first matrix are its gate's, then its up projection's."""
    z = _linear(y, weights, f"{name}linear_fc1")
    function = _activation(rules.activation)
    if rules.is_gated:
        gate, up = np.split(z, 2, -1)
        z = function(gate) * up
    else:
        z = function(z)
    return np.asarray(z @ weights[f"{name}linear_fc2.weight"].T)


def _experts(y: Array, weights: Weights, name: str, rules: Rules) -> Array:
    """TopKRouter with moe_router_pre_softmax False: the softmax is over the chosen ones."""
    chances = y @ weights[f"{name}mlp.router.weight"].T
    chosen = np.argsort(-chances, -1)[..., : rules.active_experts]
    best = np.take_along_axis(chances, chosen, -1)
    shares = np.exp(best - best.max(-1, keepdims=True))
    shares = shares / shares.sum(-1, keepdims=True)
    out = np.zeros_like(y)
    for expert in range(chances.shape[-1]):
        share = np.where(chosen == expert, shares, 0).sum(-1, keepdims=True)
        out = out + share * _feed_forward(y, weights, f"{name}mlp.experts.local_experts.{expert}.", rules)
    return out
