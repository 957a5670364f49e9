"""FasterTransformer's GPT as transformers' GPT-2: learned positions, norms before each half of a block.

Names and shapes: transformers, ``models/gpt2/modeling_gpt2.py``. Its linear layers are [in, out], as those of
FasterTransformer.
"""

from __future__ import annotations

from typing import Any

from export_scripts.targets.huggingface.decoders import (
    activation,
    gpt2_keys,
    head_if_untied,
    tied_copy,
    unlike,
)
from export_scripts.targets.huggingface.table import Facts, Taken, Target, in_every_layer
from ft_format.families.gpt import GptDims

_LAYER = {
    "ln_1.weight": Taken("input_layernorm.weight"),
    "ln_1.bias": Taken("input_layernorm.bias"),
    "attn.c_attn.weight": Taken("attention.query_key_value.weight", merged=(1, 3)),
    "attn.c_attn.bias": Taken("attention.query_key_value.bias", merged=(3,)),
    "attn.c_proj.weight": Taken("attention.dense.weight"),
    "attn.c_proj.bias": Taken("attention.dense.bias"),
    "ln_2.weight": Taken("post_attention_layernorm.weight"),
    "ln_2.bias": Taken("post_attention_layernorm.bias"),
    "mlp.c_fc.weight": Taken("mlp.dense_h_to_4h.weight"),
    "mlp.c_fc.bias": Taken("mlp.dense_h_to_4h.bias"),
    "mlp.c_proj.weight": Taken("mlp.dense_4h_to_h.weight"),
    "mlp.c_proj.bias": Taken("mlp.dense_4h_to_h.bias"),
}


def _tensors(dims: GptDims, facts: Facts) -> dict[str, Taken]:
    return {
        "transformer.wte.weight": Taken("model.wte"),
        "transformer.wpe.weight": Taken("model.wpe"),
        **in_every_layer("transformer.h.{layer}.", _LAYER, dims.num_layer),
        "transformer.ln_f.weight": Taken("model.final_layernorm.weight"),
        "transformer.ln_f.bias": Taken("model.final_layernorm.bias"),
        **head_if_untied("lm_head.weight", dims, facts),
    }


def _config(dims: GptDims, facts: Facts) -> dict[str, Any]:
    return {**gpt2_keys(dims, facts), "activation_function": activation(dims, facts)}


def _problems(dims: GptDims, facts: Facts) -> list[str]:
    return unlike(
        dims,
        positions=("learned", "it adds a table of learned positions"),
        layernorm_type=("pre_layernorm", "its norms come before attention and feed-forward"),
        has_pre_decoder_layernorm=(False, "no norm follows its embedding"),
        has_post_decoder_layernorm=(True, "a norm follows its last layer"),
        adapter_inter_size=(0, "it has no adapters"),
    )


GPT2 = Target("gpt2", "GPT2LMHeadModel", _tensors, _config, _problems, tied_copy)
