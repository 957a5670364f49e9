"""Hugging Face OPT and FasterTransformer's GPT with ReLU or norms after each half of a block.

Its table of positions begins with two rows that no position of a text uses. OPT-350m's embedding is narrower than its
layers, with a linear layer without a bias behind it and another before the output projection. What they give together
are an embedding and an output projection of the layers' width.

Names and keys: transformers, ``models/opt/modeling_opt.py``.
"""

from __future__ import annotations

from typing import Any

from export_scripts.weights.architecture import Architecture, Limit, Product, other_than
from export_scripts.weights.hub_keys import Facts, Keys, activation, is_tied
from export_scripts.weights.hub_tensor import TURNED, HubTensor, both, in_layers, thirds
from export_scripts.weights.settings import Settings
from ft_format.families import gpt
from ft_format.families.gpt import GptDims

_UNUSED_ROWS = 2  # OPTLearnedPositionalEmbedding.offset
_QKV = "attention.query_key_value"
_NAMES = {
    "self_attn_layer_norm": "input_layernorm",
    "self_attn.out_proj": "attention.dense",
    "final_layer_norm": "post_attention_layernorm",
    "fc1": "mlp.dense_h_to_4h",
    "fc2": "mlp.dense_4h_to_h",
}
_PROJECTIONS = tuple(f"self_attn.{part}_proj" for part in "qkv")
LAYER = {
    **thirds(_PROJECTIONS, _QKV),
    **{
        f"{name}.bias": HubTensor(f"{_QKV}.bias", part=(0, index, index + 1), merged=(3,))
        for index, name in enumerate(_PROJECTIONS)
    },
    **{
        f"{name}.weight": HubTensor(f"{pivot}.weight", order=() if "norm" in pivot else TURNED)
        for name, pivot in _NAMES.items()
    },
    **{f"{name}.bias": HubTensor(f"{pivot}.bias") for name, pivot in _NAMES.items()},
}
"""A layer of OPT, and of XGLM."""


def _tensors(dims: GptDims) -> dict[str, HubTensor]:
    last = both("model.decoder.final_layer_norm", "model.final_layernorm")
    return {
        "model.decoder.embed_tokens.weight": HubTensor("model.wte"),
        "model.decoder.embed_positions.weight": HubTensor("model.wpe", rows_before=_UNUSED_ROWS),
        **in_layers("model.decoder.layers.{layer}.", LAYER),
        **(last if dims.has_post_decoder_layernorm else {}),
        "lm_head.weight": HubTensor(gpt.HEAD_FILE),
    }


def _more_dims(settings: Settings) -> dict[str, Any]:
    is_pre_norm = bool(settings.get("do_layer_norm_before", True))
    return {
        "layernorm_type": "pre_layernorm" if is_pre_norm else "post_layernorm",
        "has_post_decoder_layernorm": is_pre_norm and not settings.get("_remove_final_layer_norm"),
    }


def _products(settings: Settings) -> dict[str, Product]:
    if settings.get("word_embed_proj_dim") in (None, settings.get("hidden_size")):
        return {}
    embedding = "decoder.embed_tokens.weight"
    head = embedding if settings.get("tie_word_embeddings", True) else "lm_head.weight"
    return {
        embedding: Product(embedding, "decoder.project_in.weight", is_transposed=True),
        "lm_head.weight": Product(head, "decoder.project_out.weight", is_transposed=False),
    }


def _unlike(dims: GptDims, facts: Facts) -> list[str]:
    is_post_norm = dims.layernorm_type == "post_layernorm"
    found = other_than(
        dims,
        positions=("learned", "it adds a table of learned positions"),
        has_pre_decoder_layernorm=(False, "no norm follows its embedding"),
        layernorm_eps=(1e-5, "its norms have an epsilon of 1e-05"),
        adapter_inter_size=(0, "it has no adapters"),
    )
    if is_post_norm and dims.has_post_decoder_layernorm:
        found.append("has_post_decoder_layernorm: True  (with norms after each half it has none after the last layer)")
    if not is_post_norm and dims.activation_type != "Relu":
        found.append(f"activation_type: {dims.activation_type}  (with norms before each half it has ReLU)")
    return found


OPT = Architecture(
    model_type="opt",
    class_name="OPTForCausalLM",
    title="OPT",
    family=gpt.FAMILY,
    tensors=_tensors,
    ignored={"decoder.version": "fairseq's version of its format"},
    keys=Keys(
        {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_units",
            "word_embed_proj_dim": lambda dims, facts: dims.hidden_units,
            "num_hidden_layers": "num_layer",
            "num_attention_heads": "head_num",
            "ffn_dim": "inter_size",
            "max_position_embeddings": "max_pos_seq_len",
            "activation_function": activation,
            "do_layer_norm_before": lambda dims, facts: dims.layernorm_type == "pre_layernorm",
            "_remove_final_layer_norm": lambda dims, facts: not dims.has_post_decoder_layernorm,
            "enable_bias": True,
            "layer_norm_elementwise_affine": True,
            "tie_word_embeddings": is_tied,
        }
    ),
    more_dims=_more_dims,
    prefix="model.",
    embedding="decoder.embed_tokens.weight",
    activation=("activation_function", "relu"),
    limits={"layer_norm_elementwise_affine": Limit((True,), "its norms have weights")},
    products=_products,
    without_biases=lambda settings: () if settings.get("enable_bias", True) else ("*.self_attn.*.bias", "*.fc?.bias"),
    unlike=_unlike,
)
