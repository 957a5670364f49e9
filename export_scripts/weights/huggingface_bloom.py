"""Hugging Face BLOOM as FasterTransformer's GPT: ALiBi instead of positions, and a norm behind the embedding.

Keys: transformers, ``models/bloom/modeling_bloom.py``.
"""

from __future__ import annotations

from export_scripts.weights.architecture import Architecture, Limit, Settings, in_layers
from export_scripts.weights.layouts import qkv_by_head_to_block, transposed, unchanged
from export_scripts.weights.schema import ModelDims, Rule, SourceMap
from ft_format.families import gpt
from models.checks import shown

_LAYER = {
    "input_layernorm.weight": Rule("input_layernorm.weight", unchanged),
    "input_layernorm.bias": Rule("input_layernorm.bias", unchanged),
    "self_attention.query_key_value.weight": Rule("attention.query_key_value.weight", qkv_by_head_to_block),
    "self_attention.query_key_value.bias": Rule("attention.query_key_value.bias", qkv_by_head_to_block),
    "self_attention.dense.weight": Rule("attention.dense.weight", transposed),
    "self_attention.dense.bias": Rule("attention.dense.bias", unchanged),
    "post_attention_layernorm.weight": Rule("post_attention_layernorm.weight", unchanged),
    "post_attention_layernorm.bias": Rule("post_attention_layernorm.bias", unchanged),
    "mlp.dense_h_to_4h.weight": Rule("mlp.dense_h_to_4h.weight", transposed),
    "mlp.dense_h_to_4h.bias": Rule("mlp.dense_h_to_4h.bias", unchanged),
    "mlp.dense_4h_to_h.weight": Rule("mlp.dense_4h_to_h.weight", transposed),
    "mlp.dense_4h_to_h.bias": Rule("mlp.dense_4h_to_h.bias", unchanged),
}
_TABLE = SourceMap(
    name="Hugging Face BLOOM",
    rules={
        "word_embeddings.weight": Rule("model.wte", unchanged),
        "word_embeddings_layernorm.weight": Rule("model.pre_decoder_layernorm.weight", unchanged),
        "word_embeddings_layernorm.bias": Rule("model.pre_decoder_layernorm.bias", unchanged),
        "ln_f.weight": Rule("model.final_layernorm.weight", unchanged),
        "ln_f.bias": Rule("model.final_layernorm.bias", unchanged),
        "lm_head.weight": Rule("model.lm_head.weight", unchanged),
        **in_layers("h.{layer}.", _LAYER),
    },
    ignored={},
)


def _dims(settings: Settings) -> ModelDims:
    return ModelDims(
        head_num=settings.size("n_head"),
        size_per_head=settings.head_size("hidden_size", "n_head"),
        inter_size=4 * settings.size("hidden_size"),
        num_layer=settings.size("n_layer"),
        max_pos_seq_len=0,
        vocab_size=settings.size("vocab_size"),
        layernorm_eps=settings.epsilon("layer_norm_epsilon"),
        has_positional_encoding=False,
        has_pre_decoder_layernorm=True,
        use_attention_linear_bias=True,
        model_variant="bloom-pre",
    )


def _problems(settings: Settings) -> list[str]:
    """Name the pair of keys under which transformers leaves the biases of two layers out."""
    if not settings.get("slow_but_exact") or settings.get("pretraining_tp", 1) == 1:
        return []
    return [f"slow_but_exact: True, with pretraining_tp {shown(settings['pretraining_tp'])}  (its sums have biases)"]


BLOOM = Architecture(
    model_type="bloom",
    family=gpt.FAMILY,
    source_map=_TABLE,
    dims=_dims,
    prefix="transformer.",
    embedding="word_embeddings.weight",
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    limits={
        "apply_residual_connection_post_layernorm": Limit((False, None), "its residual is what a norm gets, not gives"),
    },
    more_problems=_problems,
)
