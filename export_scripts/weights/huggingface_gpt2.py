"""Hugging Face GPT-2 and FasterTransformer's GPT: learned positions, norms before each half of a block.

Names and keys: transformers, ``models/gpt2/modeling_gpt2.py``. Its linear layers are [in, out], as FasterTransformer's.
"""

from __future__ import annotations

from typing import Any

from export_scripts.weights.architecture import Architecture, Limit, other_than
from export_scripts.weights.hub_keys import Facts, Keys, activation, is_tied
from export_scripts.weights.hub_tensor import HubTensor, both, in_layers
from export_scripts.weights.settings import Settings
from ft_format.families import gpt
from ft_format.families.gpt import GptDims

OUTER = {"transformer.wte.weight": HubTensor("model.wte"), "transformer.wpe.weight": HubTensor("model.wpe")}
LAST = {**both("transformer.ln_f", "model.final_layernorm"), "lm_head.weight": HubTensor(gpt.HEAD_FILE)}
_TENSORS = {
    **OUTER,
    **in_layers(
        "transformer.h.{layer}.",
        {
            **both("ln_1", "input_layernorm"),
            "attn.c_attn.weight": HubTensor("attention.query_key_value.weight", merged=(1, 3)),
            "attn.c_attn.bias": HubTensor("attention.query_key_value.bias", merged=(3,)),
            **both("attn.c_proj", "attention.dense"),
            **both("ln_2", "post_attention_layernorm"),
            **both("mlp.c_fc", "mlp.dense_h_to_4h"),
            **both("mlp.c_proj", "mlp.dense_4h_to_h"),
        },
    ),
    **LAST,
}
NAMES = {
    "vocab_size": "vocab_size",
    "n_positions": "max_pos_seq_len",
    "n_embd": "hidden_units",
    "n_layer": "num_layer",
    "n_head": "head_num",
    "n_inner": "inter_size",
    "layer_norm_epsilon": "layernorm_eps",
    "tie_word_embeddings": is_tied,
}
"""Keys, which later architectures have taken over."""
KEYS = Keys({**NAMES, "activation_function": activation}, {"max_pos_seq_len": 1024})
ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}
"""Other names of keys, which later architectures have taken over."""
IGNORED = {"h.*.attn.bias": "the causal mask", "h.*.attn.masked_bias": "the value that masks"}


def inter_size(settings: Settings) -> dict[str, Any]:
    """Read the feed-forward's width: four times the model's where it is not said."""
    return {"inter_size": settings.size("n_inner", default=4 * settings.size("n_embd"))}


def _unlike(dims: GptDims, facts: Facts) -> list[str]:
    return other_than(
        dims,
        positions=("learned", "it adds a table of learned positions"),
        layernorm_type=("pre_layernorm", "its norms come before attention and feed-forward"),
        has_pre_decoder_layernorm=(False, "no norm follows its embedding"),
        has_post_decoder_layernorm=(True, "a norm follows its last layer"),
        adapter_inter_size=(0, "it has no adapters"),
    )


GPT2 = Architecture(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    title="GPT-2",
    family=gpt.FAMILY,
    tensors=lambda dims: _TENSORS,
    ignored=IGNORED,
    keys=KEYS,
    more_dims=inter_size,
    prefix="transformer.",
    embedding="wte.weight",
    aliases=ALIASES,
    activation=("activation_function", "gelu_new"),
    limits={
        "scale_attn_weights": Limit((True,), "it divides scores by the root of the head's size"),
        "scale_attn_by_inverse_layer_idx": Limit((False, None), "it does not scale scores by the layer"),
        "add_cross_attention": Limit((False, None), "it has no encoder"),
    },
    unlike=_unlike,
)
