"""Llama and its relatives: the community's FasterTransformer layout, declared once, and its ``config.ini``.

Layout and keys: FasterTransformer's Llama of void-main, LlamaWeight.cc, LlamaDecoderLayerWeight.cc and
LlamaTritonModel.cc; kv_head_num, rope_theta and rope_scaling_factor are those of its branches with grouped queries.
What these cannot express has keys and files of its own, which their loaders do not open: ``beyond_fastertransformer``
says when there are such.

A rank's file of query, key and value holds the rank's columns of each side by side. Between a source and a target they
are three tensors. The axes of a query's heads are two, groups and heads of a group: heads of one group follow one
another, and use one key and value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ft_format.config_ini import ConfigIni, Sections
from ft_format.families.family import LAYERS, SIZE, ConfigValues, Family
from ft_format.families.llama_dims import (
    ACTIVATIONS,
    LAYER_NORM,
    NORMS,
    ROPE_TYPES,
    LlamaDims,
    beyond_fastertransformer,
)
from ft_format.layout import TensorSpec, in_every_layer
from ft_format.values import FLAG, INDEX, Values, decimal, fraction, one_of

SECTION = "llama"
EMBEDDING_FILE, HEAD_FILE = "model.wte.weight", "model.lm_head.weight"
_QUERY = ("kv_head_num", "heads_per_group", "size_per_head")
_KEY = ("kv_head_num", "size_per_head")
_QKV = ("qkv_head_num", "size_per_head")
_WIDTH = TensorSpec(("hidden_units",))
_VOCABULARY = TensorSpec(("vocab_size", "hidden_units"))

_ATTENTION = {
    "attention.query_key_value.weight": TensorSpec(
        ("hidden_units", _QKV),
        split_axis=1,
        parts=(
            ("query", TensorSpec(("hidden_units", _QUERY), split_axis=1)),
            ("key", TensorSpec(("hidden_units", _KEY), split_axis=1)),
            ("value", TensorSpec(("hidden_units", _KEY), split_axis=1)),
        ),
    ),
    "attention.dense.weight": TensorSpec((_QUERY, "hidden_units"), split_axis=0),
}
_QKV_BIAS = {
    "attention.query_key_value.bias": TensorSpec(
        (_QKV,),
        split_axis=0,
        parts=(
            ("query", TensorSpec((_QUERY,), split_axis=0)),
            ("key", TensorSpec((_KEY,), split_axis=0)),
            ("value", TensorSpec((_KEY,), split_axis=0)),
        ),
    ),
}
_QK_NORMS = {
    "attention.query_norm.weight": TensorSpec(("size_per_head",)),
    "attention.key_norm.weight": TensorSpec(("size_per_head",)),
}
_GATE = {"gate_proj.weight": TensorSpec(("hidden_units", "inter_size"), split_axis=1)}
_FEED_FORWARD = {
    "up_proj.weight": TensorSpec(("hidden_units", "inter_size"), split_axis=1),
    "down_proj.weight": TensorSpec(("inter_size", "hidden_units"), split_axis=0),
}
_GATE_BIAS = {"gate_proj.bias": TensorSpec(("inter_size",), split_axis=0)}
_FEED_FORWARD_BIASES = {"up_proj.bias": TensorSpec(("inter_size",), split_axis=0), "down_proj.bias": _WIDTH}
_ROUTER = {"mlp.router.weight": TensorSpec(("hidden_units", "expert_num"))}
_OUTPUT_NORMS = ("attention_output_layernorm", "mlp_output_layernorm")


def schema(dims: LlamaDims) -> dict[str, TensorSpec]:
    """List every file of a model by name, without ``.<rank>.bin``."""
    return {
        EMBEDDING_FILE: _VOCABULARY,
        **_norm("model.final_layernorm", dims),
        HEAD_FILE: _VOCABULARY,
        **in_every_layer(_layer(dims), dims.num_layer),
    }


def _layer(dims: LlamaDims) -> dict[str, TensorSpec]:
    norms = ("input_layernorm", "post_attention_layernorm", *(_OUTPUT_NORMS if dims.has_output_norms else ()))
    return {
        **{key: spec for name in norms for key, spec in _norm(name, dims).items()},
        **_ATTENTION,
        **(_QKV_BIAS if dims.has_qkv_bias else {}),
        **({"attention.dense.bias": _WIDTH} if dims.has_dense_bias else {}),
        **(_QK_NORMS if dims.qk_norm else {}),
        **_feed_forwards(dims),
    }


def _feed_forwards(dims: LlamaDims) -> dict[str, TensorSpec]:
    one = {**(_GATE if dims.is_gated else {}), **_FEED_FORWARD}
    if dims.has_mlp_bias:
        one |= {**(_GATE_BIAS if dims.is_gated else {}), **_FEED_FORWARD_BIASES}
    if not dims.expert_num:
        return {f"mlp.{name}": spec for name, spec in one.items()}
    experts = {f"mlp.experts.{n}.{name}": spec for n in range(dims.expert_num) for name, spec in one.items()}
    return {**_ROUTER, **experts}


def _norm(name: str, dims: LlamaDims) -> dict[str, TensorSpec]:
    has_bias = dims.layernorm_type == LAYER_NORM
    return {f"{name}.weight": _WIDTH, **({f"{name}.bias": _WIDTH} if has_bias else {})}


_SIZES = ("head_num", "kv_head_num", "size_per_head", "inter_size", "num_layer", "rotary_embedding")
_KINDS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("int", "int | None"), INDEX),
    "float": decimal,
    "bool": FLAG,
    "str": str,
}
_OWN_KINDS: dict[str, Callable[[str], Any]] = {
    "rope_type": one_of({name: name for name in ROPE_TYPES}),
    "layernorm_type": one_of({name: name for name in NORMS}),
    "activation_type": one_of({name: name for name in ACTIVATIONS}),
}
# Keys that FasterTransformer's converters always write; the others are written where the model is no plain Llama.
_USUAL = ("rope_theta", "rope_scaling_factor")
_OPTIONAL = {field.name: field for field in fields(LlamaDims) if field.name in LlamaDims.__dict__}


def config(values: ConfigValues) -> Sections:
    """List ``config.ini``: the keys of FasterTransformer's converters in their order, then those of ours."""
    dims: LlamaDims = values.dims
    own = {key: getattr(dims, key) for key, field in _OPTIONAL.items() if getattr(dims, key) != field.default}
    if dims.hidden_units != dims.head_num * dims.size_per_head:
        own["hidden_units"] = dims.hidden_units
    if dims.kv_head_copies > 1:  # last, as where shards are cut again
        own["kv_head_copies"] = own.pop("kv_head_copies")
    return {
        SECTION: {
            "model_name": SECTION,
            **{key: getattr(dims, key) for key in _SIZES},
            "layernorm_eps": dims.layernorm_eps,
            "vocab_size": dims.vocab_size,
            "start_id": values.start_id,
            "end_id": values.end_id,
            "weight_data_type": values.data_type,
            **{key: getattr(dims, key) for key in _USUAL},
            "max_pos_seq_len": dims.max_pos_seq_len,
            "tensor_para_size": values.tensor_para_size,
            **{key: int(value) if isinstance(value, bool) else value for key, value in own.items()},
        }
    }


def read(ini: ConfigIni, has: Callable[[str], bool], position_num: int | None = None) -> LlamaDims:
    """Read the dimensions; keys and defaults are those of LlamaTritonModel.cc.

    ``layernorm_eps`` is 1e-6 where an older converter has left it out.
    """
    section = ini[SECTION]
    sizes: dict[str, Any] = {
        key: section.get(key, SIZE) for key in ("head_num", "size_per_head", "inter_size", "vocab_size")
    }
    sizes["kv_head_num"] = section.get("kv_head_num", SIZE, sizes["head_num"])
    section.refuse("kv_head_num", sizes["head_num"] % sizes["kv_head_num"] != 0)
    sizes["num_layer"] = section.get("num_layer", LAYERS)
    sizes["hidden_units"] = section.get("hidden_units", SIZE, sizes["head_num"] * sizes["size_per_head"])
    width = section.get("rotary_embedding", INDEX)
    section.refuse("rotary_embedding", width % 2 == 1 or not 2 <= width <= sizes["size_per_head"])
    dims = LlamaDims(
        **sizes,
        rotary_embedding=width,
        max_pos_seq_len=section.get("max_pos_seq_len", INDEX, 0),
        layernorm_eps=section.get("layernorm_eps", fraction(), 1e-6),
        **_read_own(section),
    )
    _check_own(section, dims)
    return dims


def _read_own(section: Values) -> dict[str, Any]:
    """Read the keys that say in what a model is no plain Llama."""
    found = {key: section.find(key, _OWN_KINDS.get(key) or _KINDS[str(field.type)]) for key, field in _OPTIONAL.items()}
    return {key: value for key, value in found.items() if value is not None}


def _check_own(section: Values, dims: LlamaDims) -> None:
    """Refuse values that no model can have, with the error class of whoever reads the file."""
    layers, copies = dims.attention_window_layers, dims.kv_head_copies
    section.refuse("kv_head_copies", copies < 1 or dims.kv_head_num % max(1, copies) != 0)
    section.refuse("attention_window_layers", not layers or set(layers) - set("01") != set())
    for key in ("rope_theta", "rope_scaling_factor", "embedding_scale"):
        section.refuse(key, key in section and getattr(dims, key) <= 0)


FAMILY = Family(
    name="llama",
    schema=schema,
    config=config,
    read=read,
    sections=(SECTION,),
    model_types=("Llama",),
    kv_heads="kv_head_num",
    uses_prefixes=True,
    beyond=beyond_fastertransformer,
)
