"""Hugging Face OPT as FasterTransformer's GPT: ReLU, and positions that begin at the table's third row.

OPT-350m's embedding is narrower than its layers, with a linear layer without a bias behind it and another before the
output projection. What they give together are an embedding and an output projection of the layers' width.

Keys: transformers, ``models/opt/modeling_opt.py``.
"""

from __future__ import annotations

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.architecture import Architecture, Limit, Product, Settings, in_layers
from export_scripts.weights.layouts import qkv_one, transposed, unchanged
from export_scripts.weights.schema import ModelDims, Rule, SourceMap
from ft_format.families import gpt

_PADDING_ROWS = 2  # OPTLearnedPositionalEmbedding.offset
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def _without_padding(table: Array, dims: ModelDims) -> Array:
    """Drop the rows that no position uses: [2 + positions, hidden] becomes [positions, hidden]."""
    return table[_PADDING_ROWS:]


LAYER = {
    "self_attn_layer_norm.weight": Rule("input_layernorm.weight", unchanged),
    "self_attn_layer_norm.bias": Rule("input_layernorm.bias", unchanged),
    tuple(f"{name}.weight" for name in _QKV): Rule("attention.query_key_value.weight", qkv_one, concat_axis=1),
    tuple(f"{name}.bias" for name in _QKV): Rule("attention.query_key_value.bias", qkv_one, concat_axis=0),
    "self_attn.out_proj.weight": Rule("attention.dense.weight", transposed),
    "self_attn.out_proj.bias": Rule("attention.dense.bias", unchanged),
    "final_layer_norm.weight": Rule("post_attention_layernorm.weight", unchanged),
    "final_layer_norm.bias": Rule("post_attention_layernorm.bias", unchanged),
    "fc1.weight": Rule("mlp.dense_h_to_4h.weight", transposed),
    "fc1.bias": Rule("mlp.dense_h_to_4h.bias", unchanged),
    "fc2.weight": Rule("mlp.dense_4h_to_h.weight", transposed),
    "fc2.bias": Rule("mlp.dense_4h_to_h.bias", unchanged),
}
"""A layer of OPT, and of XGLM."""

_TABLE = SourceMap(
    name="Hugging Face OPT",
    rules={
        "decoder.embed_tokens.weight": Rule("model.wte", unchanged),
        "decoder.embed_positions.weight": Rule("model.wpe", _without_padding),
        "decoder.final_layer_norm.weight": Rule("model.final_layernorm.weight", unchanged),
        "decoder.final_layer_norm.bias": Rule("model.final_layernorm.bias", unchanged),
        "lm_head.weight": Rule("model.lm_head.weight", unchanged),
        **in_layers("decoder.layers.{layer}.", LAYER),
    },
    ignored={"decoder.version": "fairseq's version of its format"},
)


def _dims(settings: Settings) -> ModelDims:
    is_pre_norm = bool(settings.get("do_layer_norm_before", True))
    return ModelDims(
        head_num=settings.size("num_attention_heads"),
        size_per_head=settings.head_size("hidden_size", "num_attention_heads"),
        inter_size=settings.size("ffn_dim"),
        num_layer=settings.size("num_hidden_layers"),
        max_pos_seq_len=settings.size("max_position_embeddings"),
        vocab_size=settings.size("vocab_size"),
        activation_type=settings.activation("activation_function", "relu"),
        layernorm_type="pre_layernorm" if is_pre_norm else "post_layernorm",
        has_post_decoder_layernorm=is_pre_norm and not settings.get("_remove_final_layer_norm"),
    )


def _products(settings: Settings) -> dict[str, Product]:
    if settings.get("word_embed_proj_dim") in (None, settings.get("hidden_size")):
        return {}
    embedding = "decoder.embed_tokens.weight"
    head = embedding if settings.get("tie_word_embeddings", True) else "lm_head.weight"
    return {
        embedding: Product(embedding, "decoder.project_in.weight", is_transposed=True),
        "lm_head.weight": Product(head, "decoder.project_out.weight", is_transposed=False),
    }


OPT = Architecture(
    model_type="opt",
    family=gpt.FAMILY,
    source_map=_TABLE,
    dims=_dims,
    prefix="model.",
    embedding="decoder.embed_tokens.weight",
    activation=("activation_function", "relu"),
    limits={"layer_norm_elementwise_affine": Limit((True,), "its norms have weights")},
    products=_products,
    without_biases=lambda settings: () if settings.get("enable_bias", True) else ("*.attention.*", "*.mlp.*"),
)
