"""FasterTransformer's GPT-J as transformers' GPT-J. Names and shapes: ``models/gptj/modeling_gptj.py``."""

from __future__ import annotations

from typing import Any

from export_scripts.targets.huggingface.decoders import activation, gpt2_keys, head_if_untied, tied_copy
from export_scripts.targets.huggingface.table import Facts, Taken, Target, in_every_layer
from ft_format.families.gpt import GptDims

_QKV = "attention.query_key_value.weight"
_LAYER = {
    "ln_1.weight": Taken("input_layernorm.weight"),
    "ln_1.bias": Taken("input_layernorm.bias"),
    **{
        f"attn.{name}_proj.weight": Taken(_QKV, part=(1, index, index + 1), order=(1, 2, 3, 0), merged=(3, 1))
        for index, name in enumerate("qkv")
    },
    "attn.out_proj.weight": Taken("attention.dense.weight", order=(1, 0)),
    "mlp.fc_in.weight": Taken("mlp.dense_h_to_4h.weight", order=(1, 0)),
    "mlp.fc_in.bias": Taken("mlp.dense_h_to_4h.bias"),
    "mlp.fc_out.weight": Taken("mlp.dense_4h_to_h.weight", order=(1, 0)),
    "mlp.fc_out.bias": Taken("mlp.dense_4h_to_h.bias"),
}


def _tensors(dims: GptDims, facts: Facts) -> dict[str, Taken]:
    return {
        "transformer.wte.weight": Taken("model.wte"),
        **in_every_layer("transformer.h.{layer}.", _LAYER, dims.num_layer),
        "transformer.ln_f.weight": Taken("model.final_layernorm.weight"),
        "transformer.ln_f.bias": Taken("model.final_layernorm.bias"),
        **head_if_untied("lm_head.weight", dims, facts),
        "lm_head.bias": Taken("model.lm_head.bias"),
    }


def _config(dims: GptDims, facts: Facts) -> dict[str, Any]:
    return {
        **gpt2_keys(dims, facts),
        # The number of a checkpoint that does not say it: rotation needs no table, transformers makes one.
        "n_positions": dims.max_pos_seq_len or 2048,
        "rotary_dim": dims.rotary_embedding,
        "activation_function": activation(dims, facts),
    }


GPTJ = Target("gptj", "GPTJForCausalLM", _tensors, _config, lambda dims, facts: [], tied_copy)
