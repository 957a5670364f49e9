"""Hugging Face GPT-BigCode (StarCoder, SantaCoder) as FasterTransformer's GPT.

Keys: transformers, ``models/gpt_bigcode/modeling_gpt_bigcode.py``. Its heads share one key and one value;
FasterTransformer's have their own, which become copies of these: the function is the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.architecture import Architecture, Limit
from export_scripts.weights.hub_tensor import TURNED, HubTensor, both, in_layers, qkv_by_head
from export_scripts.weights.huggingface_gpt2 import ALIASES, KEYS, LAST, OUTER, inter_size
from export_scripts.weights.layouts import qkv_by_group_to_block
from export_scripts.weights.schema import ModelDims
from export_scripts.weights.settings import Settings
from ft_format.families import gpt

_LAYERS = "transformer.h.{layer}."


def _with_copies(values: Array, dims: ModelDims) -> Array:
    """Repeat the one key and value for every head: all heads are one group."""
    return qkv_by_group_to_block(dims.head_num)(values, dims)


_TENSORS = {
    **OUTER,
    **in_layers(
        _LAYERS,
        {
            **both("ln_1", "input_layernorm"),
            "attn.c_attn.weight": HubTensor("attention.query_key_value.weight", layout=_with_copies),
            "attn.c_attn.bias": HubTensor("attention.query_key_value.bias", layout=_with_copies),
            **both("attn.c_proj", "attention.dense", TURNED),
            **both("ln_2", "post_attention_layernorm"),
            **both("mlp.c_fc", "mlp.dense_h_to_4h", TURNED),
            **both("mlp.c_proj", "mlp.dense_4h_to_h", TURNED),
        },
    ),
    **LAST,
}


def _with_heads(tensors: Mapping[str, HubTensor], settings: Settings) -> Mapping[str, HubTensor]:
    """Without ``multi_query`` each head has its q, k and v side by side."""
    own = in_layers(_LAYERS, qkv_by_head("attn.c_attn", "attention.query_key_value"))
    return tensors if settings.get("multi_query", True) else {**tensors, **own}


GPT_BIGCODE = Architecture(
    model_type="gpt_bigcode",
    class_name="GPTBigCodeForCausalLM",
    title="GPT-BigCode",
    family=gpt.FAMILY,
    tensors=lambda dims: _TENSORS,
    adapt=_with_heads,
    ignored={"h.*.attn.bias": "the causal mask", "bias": "the causal mask"},
    keys=KEYS,
    more_dims=inter_size,
    prefix="transformer.",
    embedding="wte.weight",
    aliases=ALIASES,
    activation=("activation_function", "gelu_pytorch_tanh"),
    limits={
        "scale_attn_weights": Limit((True,), "it divides scores by the root of the head's size"),
        "add_cross_attention": Limit((False, None), "it has no encoder"),
    },
)
