"""FasterTransformer's GPT: its layout, declared once, and the tables that lead to it.

Layout: FasterTransformer, ParallelGptWeight.cc and ParallelGptDecoderLayerWeight.cc (``loadModel``).
"""

from __future__ import annotations

from export_scripts.weights.layouts import qkv_by_head_to_block, transposed, unchanged
from export_scripts.weights.schema import ModelDims, Rule, SourceMap, TargetTensor

_HEADS = ("head_num", "size_per_head")

_OUTER = {
    "model.wte": TargetTensor(("vocab_size", "hidden_units")),
    "model.wpe": TargetTensor(("max_pos_seq_len", "hidden_units")),
    "model.final_layernorm.weight": TargetTensor(("hidden_units",)),
    "model.final_layernorm.bias": TargetTensor(("hidden_units",)),
}
_HEAD = {"model.lm_head.weight": TargetTensor(("vocab_size", "hidden_units"))}
_LAYER = {
    "input_layernorm.weight": TargetTensor(("hidden_units",)),
    "input_layernorm.bias": TargetTensor(("hidden_units",)),
    "attention.query_key_value.weight": TargetTensor(("hidden_units", 3, _HEADS), split_axis=2),
    "attention.query_key_value.bias": TargetTensor((3, _HEADS), split_axis=1),
    "attention.dense.weight": TargetTensor(("hidden_units", "hidden_units"), split_axis=0),
    "attention.dense.bias": TargetTensor(("hidden_units",)),
    "post_attention_layernorm.weight": TargetTensor(("hidden_units",)),
    "post_attention_layernorm.bias": TargetTensor(("hidden_units",)),
    "mlp.dense_h_to_4h.weight": TargetTensor(("hidden_units", "inter_size"), split_axis=1),
    "mlp.dense_h_to_4h.bias": TargetTensor(("inter_size",), split_axis=0),
    "mlp.dense_4h_to_h.weight": TargetTensor(("inter_size", "hidden_units"), split_axis=0),
    "mlp.dense_4h_to_h.bias": TargetTensor(("hidden_units",)),
}


def schema(dims: ModelDims) -> dict[str, TargetTensor]:
    """List every tensor of a model by name, without ``.<rank>.bin``."""
    layers = {
        f"model.layers.{layer}.{name}": target for layer in range(dims.num_layer) for name, target in _LAYER.items()
    }
    return {**_OUTER, **(_HEAD if dims.has_untied_head else {}), **layers}


_SOURCE_LAYER = "model.language_model.encoder.layers.{layer}."
_TARGET_LAYER = "model.layers.{layer}."

NEMO_LEGACY = SourceMap(
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
"""NeMo 1.x with ``mcore_gpt: false``; with bias, layer norm and learned positions."""

SOURCE_MAPS = (NEMO_LEGACY,)
MEGATRON_CORE_PREFIXES = ("model.decoder.", "model.embedding.")
"""How megatron-core's keys begin (``mcore_gpt: true``)."""
