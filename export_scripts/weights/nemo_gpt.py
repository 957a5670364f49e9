"""NeMo's GPT with the keys of NeMo 1.x (``mcore_gpt: false``), as FasterTransformer's GPT.

Keys: NeMo, ``megatron_gpt_model.py`` and ``transformer.py`` of 1.23; with bias, layer norm and learned positions.
"""

from __future__ import annotations

from export_scripts.weights.layouts import qkv_by_head_to_block, transposed, unchanged
from export_scripts.weights.schema import Rule, SourceMap

_SOURCE_LAYER = "model.language_model.encoder.layers.{layer}."
_TARGET_LAYER = "model.layers.{layer}."

LEGACY = SourceMap(
    name="NeMo GPT with legacy keys",
    rules={
        "model.language_model.embedding.word_embeddings.weight": Rule("model.wte", unchanged, join_axis=0),
        "model.language_model.embedding.position_embeddings.weight": Rule("model.wpe", unchanged),
        "model.language_model.encoder.final_layernorm.weight": Rule("model.final_layernorm.weight", unchanged),
        "model.language_model.encoder.final_layernorm.bias": Rule("model.final_layernorm.bias", unchanged),
        "model.language_model.output_layer.weight": Rule("model.lm_head.weight", unchanged, join_axis=0),
        **{
            _SOURCE_LAYER + source: Rule(_TARGET_LAYER + target, layout, join_axis)
            for source, target, layout, join_axis in (
                ("input_layernorm.weight", "input_layernorm.weight", unchanged, None),
                ("input_layernorm.bias", "input_layernorm.bias", unchanged, None),
                ("self_attention.query_key_value.weight", "attention.query_key_value.weight", qkv_by_head_to_block, 0),
                ("self_attention.query_key_value.bias", "attention.query_key_value.bias", qkv_by_head_to_block, 0),
                ("self_attention.dense.weight", "attention.dense.weight", transposed, 1),
                ("self_attention.dense.bias", "attention.dense.bias", unchanged, None),
                ("post_attention_layernorm.weight", "post_attention_layernorm.weight", unchanged, None),
                ("post_attention_layernorm.bias", "post_attention_layernorm.bias", unchanged, None),
                ("mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.weight", transposed, 0),
                ("mlp.dense_h_to_4h.bias", "mlp.dense_h_to_4h.bias", unchanged, 0),
                ("mlp.dense_4h_to_h.weight", "mlp.dense_4h_to_h.weight", transposed, 1),
                ("mlp.dense_4h_to_h.bias", "mlp.dense_4h_to_h.bias", unchanged, None),
            )
        },
    },
    ignored={
        "*._extra_state": "Transformer Engine's FP8 scaling; None or bytes, no weights",
        "model.word_embeddings.weight": "the last pipeline stage's copy of the tied embedding",
    },
)

MEGATRON_CORE_PREFIXES = ("model.decoder.", "model.embedding.")
"""How megatron-core's keys begin (``mcore_gpt: true``)."""
