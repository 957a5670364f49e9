"""Hugging Face BLOOM and FasterTransformer's GPT with ALiBi instead of positions, and a norm behind the embedding.

Names and keys: transformers, ``models/bloom/modeling_bloom.py``.
"""

from __future__ import annotations

from export_scripts.weights.architecture import Architecture, Limit, other_than
from export_scripts.weights.hub_keys import Facts, Keys, activation, is_tied
from export_scripts.weights.hub_tensor import TURNED, HubTensor, both, in_layers, qkv_by_head
from export_scripts.weights.settings import Settings
from ft_format.families import gpt
from ft_format.families.gpt import GptDims
from models.checks import shown

_TENSORS = {
    "transformer.word_embeddings.weight": HubTensor("model.wte"),
    **both("transformer.word_embeddings_layernorm", "model.pre_decoder_layernorm"),
    **both("transformer.ln_f", "model.final_layernorm"),
    **in_layers(
        "transformer.h.{layer}.",
        {
            **both("input_layernorm", "input_layernorm"),
            **qkv_by_head("self_attention.query_key_value", "attention.query_key_value"),
            **both("self_attention.dense", "attention.dense", TURNED),
            **both("post_attention_layernorm", "post_attention_layernorm"),
            **both("mlp.dense_h_to_4h", "mlp.dense_h_to_4h", TURNED),
            **both("mlp.dense_4h_to_h", "mlp.dense_4h_to_h", TURNED),
        },
    ),
    "lm_head.weight": HubTensor(gpt.HEAD_FILE),
}
_RESIDUAL = "apply_residual_connection_post_layernorm"


def _problems(settings: Settings) -> list[str]:
    """Name the pair of keys under which transformers leaves the biases of two layers out."""
    if not settings.get("slow_but_exact") or settings.get("pretraining_tp", 1) == 1:
        return []
    return [f"slow_but_exact: True, with pretraining_tp {shown(settings['pretraining_tp'])}  (its sums have biases)"]


def _unlike(dims: GptDims, facts: Facts) -> list[str]:
    found = other_than(
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


BLOOM = Architecture(
    model_type="bloom",
    class_name="BloomForCausalLM",
    title="BLOOM",
    family=gpt.FAMILY,
    tensors=lambda dims: _TENSORS,
    keys=Keys(
        {
            "vocab_size": "vocab_size",
            "hidden_size": "hidden_units",
            "n_layer": "num_layer",
            "n_head": "head_num",
            "layer_norm_epsilon": "layernorm_eps",
            _RESIDUAL: False,
            "tie_word_embeddings": is_tied,
        }
    ),
    more_dims=lambda settings: {
        "inter_size": 4 * settings.size("hidden_size"),
        "max_pos_seq_len": 0,
        "has_positional_encoding": False,
        "has_pre_decoder_layernorm": True,
        "use_attention_linear_bias": True,
        "model_variant": "bloom-pre",
    },
    prefix="transformer.",
    embedding="word_embeddings.weight",
    aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    limits={_RESIDUAL: Limit((False, None), "its residual is what a norm gets, not gives")},
    more_problems=_problems,
    unlike=_unlike,
)
