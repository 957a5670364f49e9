"""FasterTransformer's GPT-NeoX as transformers' GPT-NeoX: NeMo's GPT with rotation among them.

Names and shapes: transformers, ``models/gpt_neox/modeling_gpt_neox.py``. Where attention and feed-forward run side by
side FasterTransformer has one bias for both: it becomes that of the feed-forward, and that of attention is zeros.
"""

from __future__ import annotations

from typing import Any

from export_scripts.targets.huggingface.decoders import activation, head_if_untied, is_untied, tied_copy
from export_scripts.targets.huggingface.table import Facts, Taken, Target, in_every_layer
from ft_format.families.gpt import GptDims

_BIAS_SUM = "mlp.attention.bias.sum"
_LAYER = {
    "input_layernorm.weight": Taken("input_layernorm.weight"),
    "input_layernorm.bias": Taken("input_layernorm.bias"),
    "attention.query_key_value.weight": Taken("attention.query_key_value.weight", order=(2, 1, 3, 0), merged=(3, 1)),
    "attention.query_key_value.bias": Taken("attention.query_key_value.bias", order=(1, 0, 2), merged=(3,)),
    "attention.dense.weight": Taken("attention.dense.weight", order=(1, 0)),
    "post_attention_layernorm.weight": Taken("post_attention_layernorm.weight"),
    "post_attention_layernorm.bias": Taken("post_attention_layernorm.bias"),
    "mlp.dense_h_to_4h.weight": Taken("mlp.dense_h_to_4h.weight", order=(1, 0)),
    "mlp.dense_h_to_4h.bias": Taken("mlp.dense_h_to_4h.bias"),
    "mlp.dense_4h_to_h.weight": Taken("mlp.dense_4h_to_h.weight", order=(1, 0)),
}
_SERIAL = {name: Taken(name) for name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias")}
_PARALLEL = {"attention.dense.bias": Taken(_BIAS_SUM, is_zeros=True), "mlp.dense_4h_to_h.bias": Taken(_BIAS_SUM)}


def _tensors(dims: GptDims, facts: Facts) -> dict[str, Taken]:
    layer = {**_LAYER, **(_PARALLEL if dims.use_gptj_residual else _SERIAL)}
    return {
        "gpt_neox.embed_in.weight": Taken("model.wte"),
        **in_every_layer("gpt_neox.layers.{layer}.", layer, dims.num_layer),
        "gpt_neox.final_layer_norm.weight": Taken("model.final_layernorm.weight"),
        "gpt_neox.final_layer_norm.bias": Taken("model.final_layernorm.bias"),
        **head_if_untied("embed_out.weight", dims, facts),
    }


def _config(dims: GptDims, facts: Facts) -> dict[str, Any]:
    return {
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_units,
        "num_hidden_layers": dims.num_layer,
        "num_attention_heads": dims.head_num,
        "intermediate_size": dims.inter_size,
        "hidden_act": activation(dims, facts),
        "max_position_embeddings": dims.max_pos_seq_len or 2048,
        "layer_norm_eps": dims.layernorm_eps,
        "rotary_pct": dims.rotary_embedding / dims.size_per_head,
        "rotary_emb_base": 10000,
        "use_parallel_residual": dims.use_gptj_residual,
        "attention_bias": True,
        "tie_word_embeddings": not is_untied(dims, facts),
    }


def _problems(dims: GptDims, facts: Facts) -> list[str]:
    """The rotated width is a fraction in transformers' configuration, which must come to the same number again."""
    if int(dims.size_per_head * (dims.rotary_embedding / dims.size_per_head)) == dims.rotary_embedding:
        return []
    return [f"rotary_embedding: {dims.rotary_embedding}  (no rotary_pct of {dims.size_per_head} comes to it)"]


GPTNEOX = Target("gpt_neox", "GPTNeoXForCausalLM", _tensors, _config, _problems, tied_copy)
