"""FasterTransformer's GPT with ALiBi as transformers' BLOOM. Names and shapes: ``models/bloom/modeling_bloom.py``."""

from __future__ import annotations

from typing import Any

from export_scripts.targets.huggingface.decoders import activation, head_if_untied, is_untied, tied_copy, unlike
from export_scripts.targets.huggingface.table import Facts, Taken, Target, in_every_layer
from ft_format.families.gpt import GptDims

_LAYER = {
    "input_layernorm.weight": Taken("input_layernorm.weight"),
    "input_layernorm.bias": Taken("input_layernorm.bias"),
    "self_attention.query_key_value.weight": Taken(
        "attention.query_key_value.weight", order=(2, 1, 3, 0), merged=(3, 1)
    ),
    "self_attention.query_key_value.bias": Taken("attention.query_key_value.bias", order=(1, 0, 2), merged=(3,)),
    "self_attention.dense.weight": Taken("attention.dense.weight", order=(1, 0)),
    "self_attention.dense.bias": Taken("attention.dense.bias"),
    "post_attention_layernorm.weight": Taken("post_attention_layernorm.weight"),
    "post_attention_layernorm.bias": Taken("post_attention_layernorm.bias"),
    "mlp.dense_h_to_4h.weight": Taken("mlp.dense_h_to_4h.weight", order=(1, 0)),
    "mlp.dense_h_to_4h.bias": Taken("mlp.dense_h_to_4h.bias"),
    "mlp.dense_4h_to_h.weight": Taken("mlp.dense_4h_to_h.weight", order=(1, 0)),
    "mlp.dense_4h_to_h.bias": Taken("mlp.dense_4h_to_h.bias"),
}


def _tensors(dims: GptDims, facts: Facts) -> dict[str, Taken]:
    norms = {"word_embeddings_layernorm": "pre_decoder_layernorm", "ln_f": "final_layernorm"}
    return {
        "transformer.word_embeddings.weight": Taken("model.wte"),
        **{
            f"transformer.{name}.{part}": Taken(f"model.{pivot}.{part}")
            for name, pivot in norms.items()
            for part in ("weight", "bias")
        },
        **in_every_layer("transformer.h.{layer}.", _LAYER, dims.num_layer),
        **head_if_untied("lm_head.weight", dims, facts),
    }


def _config(dims: GptDims, facts: Facts) -> dict[str, Any]:
    return {
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_units,
        "n_layer": dims.num_layer,
        "n_head": dims.head_num,
        "layer_norm_epsilon": dims.layernorm_eps,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": not is_untied(dims, facts),
    }


def _problems(dims: GptDims, facts: Facts) -> list[str]:
    found = unlike(
        dims,
        positions=("alibi", "it knows positions by ALiBi"),
        layernorm_type=("pre_layernorm", "its norms come before attention and feed-forward"),
        has_pre_decoder_layernorm=(True, "a norm follows its embedding"),
        has_post_decoder_layernorm=(True, "a norm follows its last layer"),
        inter_size=(4 * dims.hidden_units, "its feed-forward is four times as wide as the model"),
        adapter_inter_size=(0, "it has no adapters"),
    )
    if activation(dims, facts) != "gelu_new":
        found.append(f"activation: {activation(dims, facts)}  (its feed-forward has the tanh form of GELU)")
    return found


BLOOM = Target("bloom", "BloomForCausalLM", _tensors, _config, _problems, tied_copy)
