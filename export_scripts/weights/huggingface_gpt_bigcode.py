"""Hugging Face GPT-BigCode (StarCoder, SantaCoder) as FasterTransformer's GPT.

Keys: transformers, ``models/gpt_bigcode/modeling_gpt_bigcode.py``. Its heads share one key and one value;
FasterTransformer's have their own, which become copies of these: the function is the same.
"""

from __future__ import annotations

from dataclasses import replace

from export_scripts.tensors.dtypes import Array
from export_scripts.weights import huggingface_gpt2
from export_scripts.weights.architecture import Architecture, Limit, Settings, in_layers
from export_scripts.weights.layouts import qkv_by_group_to_block, qkv_by_head_to_block, transposed, unchanged
from export_scripts.weights.schema import ModelDims, Rule, SourceMap
from ft_format.families import gpt


def _with_copies(values: Array, dims: ModelDims) -> Array:
    """Repeat the one key and value for every head: all heads are one group."""
    return qkv_by_group_to_block(dims.head_num)(values, dims)


_QKV = {
    "attn.c_attn.weight": Rule("attention.query_key_value.weight", _with_copies),
    "attn.c_attn.bias": Rule("attention.query_key_value.bias", _with_copies),
}
_LAYER = {
    "ln_1.weight": Rule("input_layernorm.weight", unchanged),
    "ln_1.bias": Rule("input_layernorm.bias", unchanged),
    "attn.c_proj.weight": Rule("attention.dense.weight", transposed),
    "attn.c_proj.bias": Rule("attention.dense.bias", unchanged),
    "ln_2.weight": Rule("post_attention_layernorm.weight", unchanged),
    "ln_2.bias": Rule("post_attention_layernorm.bias", unchanged),
    "mlp.c_fc.weight": Rule("mlp.dense_h_to_4h.weight", transposed),
    "mlp.c_fc.bias": Rule("mlp.dense_h_to_4h.bias", unchanged),
    "mlp.c_proj.weight": Rule("mlp.dense_4h_to_h.weight", transposed),
    "mlp.c_proj.bias": Rule("mlp.dense_4h_to_h.bias", unchanged),
}
_TABLE = SourceMap(
    name="Hugging Face GPT-BigCode",
    rules={**huggingface_gpt2.OUTER, **in_layers("h.{layer}.", _LAYER | _QKV)},
    ignored={"h.*.attn.bias": "the causal mask", "bias": "the causal mask"},
)


def _with_heads(table: SourceMap, settings: Settings) -> SourceMap:
    """Without ``multi_query`` each head has its q, k and v side by side."""
    if settings.get("multi_query", True):
        return table
    own = {key: replace(rule, layout=qkv_by_head_to_block) for key, rule in _QKV.items()}
    return replace(table, rules={**table.rules, **in_layers("h.{layer}.", own)})


def _dims(settings: Settings) -> ModelDims:
    return huggingface_gpt2.dims_of(
        settings, activation_type=settings.activation("activation_function", "gelu_pytorch_tanh")
    )


GPT_BIGCODE = Architecture(
    model_type="gpt_bigcode",
    family=gpt.FAMILY,
    source_map=_TABLE,
    adapt=_with_heads,
    dims=_dims,
    prefix="transformer.",
    embedding="wte.weight",
    aliases=huggingface_gpt2.ALIASES,
    activation=("activation_function", "gelu_pytorch_tanh"),
    limits={
        "scale_attn_weights": Limit((True,), "it divides scores by the root of the head's size"),
        "add_cross_attention": Limit((False, None), "it has no encoder"),
    },
)
