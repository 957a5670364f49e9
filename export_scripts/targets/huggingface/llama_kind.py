"""What the architectures of transformers that are Llama's relatives share: tensors, ``config.json``, what they lack.

Names and shapes: transformers, ``models/{llama,mistral,...}/modeling_*.py``. ``config.json`` has the keys that every
version reads: ``rope_theta`` and ``rope_scaling`` are those of version 4, and version 5 takes them over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from export_scripts.targets.huggingface.table import Facts, Taken, Target, in_every_layer
from export_scripts.weights.layouts import less_one, plus_one
from ft_format.families.llama import EMBEDDING_FILE, HEAD_FILE
from ft_format.families.llama_dims import LAYER_NORM, LINEAR_ROPE, PLAIN_ROPE, LlamaDims

_FUNCTIONS = {
    "silu": "silu",
    "gelu": "gelu_pytorch_tanh",
    "relu": "relu",
    "squared_relu": "relu2",
}
NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
_GATED = {"mlp.gate_proj": "mlp.gate_proj", "mlp.up_proj": "mlp.up_proj", "mlp.down_proj": "mlp.down_proj"}
_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_ATTENTION = {
    "self_attn.q_proj": Taken("attention.query", order=(1, 2, 3, 0), merged=(3, 1)),
    "self_attn.k_proj": Taken("attention.key", order=(1, 2, 0), merged=(2, 1)),
    "self_attn.v_proj": Taken("attention.value", order=(1, 2, 0), merged=(2, 1)),
    "self_attn.o_proj": Taken("attention.dense", order=(3, 0, 1, 2), merged=(1, 3)),
}
_ATTENTION_BIASES = {
    "self_attn.q_proj": Taken("attention.query", merged=(3,)),
    "self_attn.k_proj": Taken("attention.key", merged=(2,)),
    "self_attn.v_proj": Taken("attention.value", merged=(2,)),
}
_KINDS = ("sliding_attention", "full_attention")
_FIRST_LAYERS, _BY_LAYER = "max_window_layers", "layer_types"


@dataclass(frozen=True)
class Kind:
    """What one architecture has.

    Attributes:
        fixed: dimensions that must be as here: attribute, value.
        norms: names of a layer's norms.
        feed_forward: names of its linear layers; empty: it has experts.
        stores_less_one: its norms' weights are stored less one.
        biases: whether a combination of biases (qkv, dense, mlp) can be expressed, and the keys that say it.
        window: ``Relative.window`` of the source's table: "", "all" or "some".
        eps_key: of the norms' epsilon.
        is_scaled: embeddings are multiplied by the root of the width.
        is_partly_rotated: whether partial_rotary_factor is honoured.
        needs_square_heads: heads * size must be the width.
        function_keys: keys of the feed-forward's function.
        exact_gelu: the exact GELU's name; Gemma's class takes ``gelu`` for the tanh form.
        more: keys of ``config.json`` beside those of all.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    feed_forward: Mapping[str, str] = field(default_factory=lambda: _GATED)
    stores_less_one: bool = False
    biases: Callable[[bool, bool, bool], dict[str, Any] | None] = lambda qkv, dense, mlp: (
        None if qkv or dense or mlp else {}
    )
    window: str = ""
    eps_key: str = "rms_norm_eps"
    is_scaled: bool = False
    is_partly_rotated: bool = False
    needs_square_heads: bool = False
    function_keys: tuple[str, ...] = ("hidden_act",)
    exact_gelu: str = "gelu"
    more: Callable[[LlamaDims], dict[str, Any]] = lambda dims: {}


def _problems(kind: Kind, model_type: str, dims: LlamaDims, facts: Facts) -> list[str]:
    found = [
        f"{name}: {getattr(dims, name)}  ({model_type} has {value})"
        for name, value in kind.fixed.items()
        if getattr(dims, name) != value
    ]
    if dims.model_variant and dims.model_variant != model_type:
        found.append(f"model_variant: {dims.model_variant}  (it is {model_type})")
    if not kind.feed_forward and not dims.expert_num:
        found.append(f"expert_num: 0  ({model_type} has experts)")
    if kind.biases(dims.has_qkv_bias, dims.has_dense_bias, dims.has_mlp_bias) is None:
        which = [name for name in ("has_qkv_bias", "has_dense_bias", "has_mlp_bias") if getattr(dims, name)]
        found.append(f"{', '.join(which) or 'has_qkv_bias'}: {bool(which)}  ({model_type} has other biases)")
    if kind.is_scaled and dims.embedding_scale != dims.hidden_units**0.5:
        found.append(f"embedding_scale: {dims.embedding_scale}  ({model_type} scales by the root of the width)")
    if not kind.is_partly_rotated and dims.rotary_embedding != dims.size_per_head:
        found.append(f"rotary_embedding: {dims.rotary_embedding}  ({model_type} rotates whole heads)")
    if kind.needs_square_heads and dims.head_num * dims.size_per_head != dims.hidden_units:
        found.append(f"size_per_head: {dims.size_per_head}  ({model_type} has hidden_size / num_attention_heads)")
    return found + _window_problems(kind, model_type, dims)


def _window_problems(kind: Kind, model_type: str, dims: LlamaDims) -> list[str]:
    layers = {dims.has_window(layer) for layer in range(dims.num_layer)}
    if True not in layers or kind.window == "some" or (kind.window == "all" and layers == {True}):
        return []
    has = "one in every layer" if kind.window else "none"
    return [f"attention_window: {dims.attention_window}  ({model_type} has {has})"]


def _tensors(kind: Kind, dims: LlamaDims, facts: Facts) -> dict[str, Taken]:
    stored_as = None
    if kind.stores_less_one != dims.has_zero_centred_norms:
        stored_as = less_one if kind.stores_less_one else plus_one
    bias = dims.layernorm_type == LAYER_NORM

    def norm(name: str, target: str) -> dict[str, Taken]:
        made = {f"{name}.weight": Taken(f"{target}.weight", elementwise=stored_as)}
        return {**made, f"{name}.bias": Taken(f"{target}.bias")} if bias else made

    layer: dict[str, Taken] = {}
    for name, target in kind.norms.items():
        layer |= norm(name, target)
    layer |= _attention(dims) | _feed_forward(kind, dims)
    return {
        "model.embed_tokens.weight": Taken(EMBEDDING_FILE),
        **in_every_layer("model.layers.{layer}.", layer, dims.num_layer),
        **norm("model.norm", "model.final_layernorm"),
        **({} if _is_tied(dims, facts) else {"lm_head.weight": Taken(HEAD_FILE)}),
    }


def _attention(dims: LlamaDims) -> dict[str, Taken]:
    made = {f"{name}.weight": replace(taken, pivot=f"{taken.pivot}.weight") for name, taken in _ATTENTION.items()}
    if dims.has_qkv_bias:
        made |= {f"{name}.bias": replace(each, pivot=f"{each.pivot}.bias") for name, each in _ATTENTION_BIASES.items()}
    if dims.has_dense_bias:
        made["self_attn.o_proj.bias"] = Taken("attention.dense.bias")
    return made


def _feed_forward(kind: Kind, dims: LlamaDims) -> dict[str, Taken]:
    if dims.expert_num:
        router = {"block_sparse_moe.gate.weight": Taken("mlp.router.weight", order=(1, 0))}
        return router | {
            f"block_sparse_moe.experts.{n}.{name}.weight": Taken(f"mlp.experts.{n}.{target}.weight", order=(1, 0))
            for n in range(dims.expert_num)
            for name, target in _EXPERT.items()
        }
    made = {f"{name}.weight": Taken(f"{target}.weight", order=(1, 0)) for name, target in kind.feed_forward.items()}
    if dims.has_mlp_bias:
        made |= {f"{name}.bias": Taken(f"{target}.bias") for name, target in kind.feed_forward.items()}
    return made


def _config(kind: Kind, dims: LlamaDims, facts: Facts) -> dict[str, Any]:
    is_square = dims.head_num * dims.size_per_head == dims.hidden_units
    return {
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_units,
        "intermediate_size": dims.inter_size,
        "num_hidden_layers": dims.num_layer,
        "num_attention_heads": dims.head_num,
        "num_key_value_heads": dims.kv_head_num,
        **({} if kind.needs_square_heads and is_square else {"head_dim": dims.size_per_head}),
        **dict.fromkeys(kind.function_keys, _function(kind, dims)),
        "max_position_embeddings": dims.max_pos_seq_len or 2048,
        kind.eps_key: dims.layernorm_eps,
        **_rope(kind, dims),
        **_window(kind, dims),
        **(kind.biases(dims.has_qkv_bias, dims.has_dense_bias, dims.has_mlp_bias) or {}),
        **kind.more(dims),
        "tie_word_embeddings": _is_tied(dims, facts),
    }


def _function(kind: Kind, dims: LlamaDims) -> str:
    return kind.exact_gelu if dims.activation_type == "exact_gelu" else _FUNCTIONS[dims.activation_type]


def _rope(kind: Kind, dims: LlamaDims) -> dict[str, Any]:
    part = {"partial_rotary_factor": dims.rotary_embedding / dims.size_per_head} if kind.is_partly_rotated else {}
    made: dict[str, Any] = {"rope_theta": dims.rope_theta, "rope_scaling": None, **part}
    if dims.rope_type == PLAIN_ROPE:
        return made
    scaling: dict[str, Any] = {"rope_type": dims.rope_type, "factor": dims.rope_scaling_factor}
    if dims.rope_type == LINEAR_ROPE:
        return {**made, "rope_scaling": {**scaling, "type": LINEAR_ROPE}}
    scaling |= {"low_freq_factor": dims.rope_low_freq_factor, "high_freq_factor": dims.rope_high_freq_factor}
    return {**made, "rope_scaling": {**scaling, "original_max_position_embeddings": dims.rope_original_max_position}}


def _window(kind: Kind, dims: LlamaDims) -> dict[str, Any]:
    if not kind.window:
        return {}
    flags = [dims.has_window(layer) for layer in range(dims.num_layer)]
    if kind.window == "all":
        return {"sliding_window": dims.attention_window if all(flags) else None}
    said: dict[str, Any] = {_BY_LAYER: [_KINDS[0] if each else _KINDS[1] for each in flags]}
    if any(flags):
        said["sliding_window"] = dims.attention_window
    if dims.has_output_norms:
        return said
    return {
        **said,
        "use_sliding_window": any(flags),
        _FIRST_LAYERS: flags.index(True) if any(flags) else dims.num_layer,
    }


def _is_tied(dims: LlamaDims, facts: Facts) -> bool:
    return facts.is_head_tied or not dims.has_untied_head


def _dropped(dims: LlamaDims, facts: Facts) -> dict[str, str]:
    return {HEAD_FILE: "the tied copy of the embedding"} if _is_tied(dims, facts) else {}


def make_target(model_type: str, architecture: str, kind: Kind) -> Target:
    """Make an architecture's tables: transformers' name of it, the class that generates, and what it has."""
    return Target(
        model_type,
        architecture,
        lambda dims, facts: _tensors(kind, dims, facts),
        lambda dims, facts: _config(kind, dims, facts),
        lambda dims, facts: _problems(kind, model_type, dims, facts),
        _dropped,
    )
