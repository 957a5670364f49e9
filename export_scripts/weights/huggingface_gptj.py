"""Hugging Face GPT-J and FasterTransformer's GPT-J: both rotate neighbouring elements of a head by position.

Names and keys: transformers, ``models/gptj/modeling_gptj.py``.
"""

from __future__ import annotations

from export_scripts.weights.architecture import Architecture
from export_scripts.weights.hub_keys import Keys, activation
from export_scripts.weights.hub_tensor import TURNED, HubTensor, both, in_layers, thirds
from export_scripts.weights.huggingface_gpt2 import ALIASES, IGNORED, LAST, NAMES, inter_size
from ft_format.families import gptj

_TENSORS = {
    "transformer.wte.weight": HubTensor("model.wte"),
    **in_layers(
        "transformer.h.{layer}.",
        {
            **both("ln_1", "input_layernorm"),
            **thirds((f"attn.{part}_proj" for part in "qkv"), "attention.query_key_value"),
            "attn.out_proj.weight": HubTensor("attention.dense.weight", order=TURNED),
            **both("mlp.fc_in", "mlp.dense_h_to_4h", TURNED),
            **both("mlp.fc_out", "mlp.dense_4h_to_h", TURNED),
        },
    ),
    **LAST,
    "lm_head.bias": HubTensor("model.lm_head.bias"),
}
# 2048 positions are those of a checkpoint that does not say it: rotation needs no table, transformers makes one.
KEYS = Keys(
    {**NAMES, "rotary_dim": "rotary_embedding", "activation_function": activation},
    {"max_pos_seq_len": 2048},
)

GPTJ = Architecture(
    model_type="gptj",
    class_name="GPTJForCausalLM",
    title="GPT-J",
    family=gptj.FAMILY,
    tensors=lambda dims: _TENSORS,
    ignored={**IGNORED, "h.*.attn.embed_positions": "the table of angles, which is computed"},
    keys=KEYS,
    more_dims=lambda settings: {**inter_size(settings), "use_gptj_residual": True},
    prefix="transformer.",
    embedding="wte.weight",
    aliases=ALIASES,
    has_tied_head=False,
    activation=("activation_function", "gelu_new"),
    family_eps=1e-6,
)
