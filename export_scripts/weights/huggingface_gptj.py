"""Hugging Face GPT-J as FasterTransformer's GPT-J.

Keys: transformers, ``models/gptj/modeling_gptj.py``. Both rotate neighbouring elements of a head by position.
"""

from __future__ import annotations

from export_scripts.weights.architecture import Architecture, Settings, in_layers
from export_scripts.weights.huggingface_gpt2 import ALIASES, dims_of
from export_scripts.weights.layouts import qkv_one, transposed, unchanged
from export_scripts.weights.schema import ModelDims, Rule, SourceMap
from ft_format.families import gptj

_QKV = ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight")
_LAYER = {
    "ln_1.weight": Rule("input_layernorm.weight", unchanged),
    "ln_1.bias": Rule("input_layernorm.bias", unchanged),
    _QKV: Rule("attention.query_key_value.weight", qkv_one, concat_axis=1),
    "attn.out_proj.weight": Rule("attention.dense.weight", transposed),
    "mlp.fc_in.weight": Rule("mlp.dense_h_to_4h.weight", transposed),
    "mlp.fc_in.bias": Rule("mlp.dense_h_to_4h.bias", unchanged),
    "mlp.fc_out.weight": Rule("mlp.dense_4h_to_h.weight", transposed),
    "mlp.fc_out.bias": Rule("mlp.dense_4h_to_h.bias", unchanged),
}
_TABLE = SourceMap(
    name="Hugging Face GPT-J",
    rules={
        "wte.weight": Rule("model.wte", unchanged),
        "ln_f.weight": Rule("model.final_layernorm.weight", unchanged),
        "ln_f.bias": Rule("model.final_layernorm.bias", unchanged),
        "lm_head.weight": Rule("model.lm_head.weight", unchanged),
        "lm_head.bias": Rule("model.lm_head.bias", unchanged),
        **in_layers("h.{layer}.", _LAYER),
    },
    ignored={
        "h.*.attn.bias": "the causal mask",
        "h.*.attn.masked_bias": "the value that masks",
        "h.*.attn.embed_positions": "the table of angles, which is computed",
    },
)


def _dims(settings: Settings) -> ModelDims:
    return dims_of(settings, 2048, rotary_embedding=settings.size("rotary_dim"), use_gptj_residual=True)


GPTJ = Architecture(
    model_type="gptj",
    family=gptj.FAMILY,
    source_map=_TABLE,
    dims=_dims,
    prefix="transformer.",
    embedding="wte.weight",
    aliases=ALIASES,
    has_tied_head=False,
    activation=("activation_function", "gelu_new"),
    family_eps=1e-6,
)
