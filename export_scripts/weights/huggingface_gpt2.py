"""Hugging Face GPT-2 as FasterTransformer's GPT.

Keys: transformers, ``models/gpt2/modeling_gpt2.py``. Its linear layers are [in, out], as FasterTransformer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.weights.architecture import Architecture, Limit, Settings, in_layers
from export_scripts.weights.layouts import qkv_blocks, unchanged
from export_scripts.weights.schema import ModelDims, Rule, Rules, SourceMap, Sources
from ft_format.families import gpt

_LAYER = {
    "ln_1.weight": Rule("input_layernorm.weight", unchanged),
    "ln_1.bias": Rule("input_layernorm.bias", unchanged),
    "attn.c_attn.weight": Rule("attention.query_key_value.weight", qkv_blocks),
    "attn.c_attn.bias": Rule("attention.query_key_value.bias", qkv_blocks),
    "attn.c_proj.weight": Rule("attention.dense.weight", unchanged),
    "attn.c_proj.bias": Rule("attention.dense.bias", unchanged),
    "ln_2.weight": Rule("post_attention_layernorm.weight", unchanged),
    "ln_2.bias": Rule("post_attention_layernorm.bias", unchanged),
    "mlp.c_fc.weight": Rule("mlp.dense_h_to_4h.weight", unchanged),
    "mlp.c_fc.bias": Rule("mlp.dense_h_to_4h.bias", unchanged),
    "mlp.c_proj.weight": Rule("mlp.dense_4h_to_h.weight", unchanged),
    "mlp.c_proj.bias": Rule("mlp.dense_4h_to_h.bias", unchanged),
}
OUTER: Mapping[Sources, Rules] = {
    "wte.weight": Rule("model.wte", unchanged),
    "wpe.weight": Rule("model.wpe", unchanged),
    "ln_f.weight": Rule("model.final_layernorm.weight", unchanged),
    "ln_f.bias": Rule("model.final_layernorm.bias", unchanged),
    "lm_head.weight": Rule("model.lm_head.weight", unchanged),
}
_TABLE = SourceMap(
    name="Hugging Face GPT-2",
    rules={**OUTER, **in_layers("h.{layer}.", _LAYER)},
    ignored={"h.*.attn.bias": "the causal mask", "h.*.attn.masked_bias": "the value that masks"},
)


ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Other names of keys, which later architectures have taken over."""


def dims_of(settings: Settings, positions: int = 1024, **more: Any) -> ModelDims:
    """Read the dimensions, whose keys later architectures have taken over.

    Args:
        settings: ``config.json``.
        positions: where it does not say how many.
        more: what else is known.
    """
    return ModelDims(
        head_num=settings.size("n_head"),
        size_per_head=settings.head_size("n_embd", "n_head"),
        inter_size=settings.size("n_inner", default=4 * settings.size("n_embd")),
        num_layer=settings.size("n_layer"),
        max_pos_seq_len=settings.size("n_positions", default=positions),
        vocab_size=settings.size("vocab_size"),
        layernorm_eps=settings.epsilon("layer_norm_epsilon"),
        **more,
    )


def _dims(settings: Settings) -> ModelDims:
    return dims_of(settings, activation_type=settings.activation("activation_function", "gelu_new"))


GPT2 = Architecture(
    model_type="gpt2",
    family=gpt.FAMILY,
    source_map=_TABLE,
    dims=_dims,
    prefix="transformer.",
    embedding="wte.weight",
    aliases=ALIASES,
    activation=("activation_function", "gelu_new"),
    limits={
        "scale_attn_weights": Limit((True,), "it divides scores by the root of the head's size"),
        "scale_attn_by_inverse_layer_idx": Limit((False, None), "it does not scale scores by the layer"),
        "add_cross_attention": Limit((False, None), "it has no encoder"),
    },
)
