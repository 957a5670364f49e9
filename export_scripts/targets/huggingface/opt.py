"""FasterTransformer's GPT with ReLU or norms after each half as transformers' OPT.

Names and shapes: transformers, ``models/opt/modeling_opt.py``. Its table of positions begins with two rows that no
position of a text uses.
"""

from __future__ import annotations

from typing import Any

from export_scripts.targets.huggingface.decoders import activation, head_if_untied, is_untied, tied_copy, unlike
from export_scripts.targets.huggingface.table import Facts, Taken, Target, in_every_layer
from ft_format.families.gpt import GptDims

_UNUSED_ROWS = 2
_QKV = "attention.query_key_value"
_NAMES = {
    "self_attn_layer_norm": "input_layernorm",
    "self_attn.out_proj": "attention.dense",
    "final_layer_norm": "post_attention_layernorm",
    "fc1": "mlp.dense_h_to_4h",
    "fc2": "mlp.dense_4h_to_h",
}
_LAYER = {
    **{
        f"self_attn.{name}_proj.weight": Taken(
            f"{_QKV}.weight", part=(1, index, index + 1), order=(1, 2, 3, 0), merged=(3, 1)
        )
        for index, name in enumerate("qkv")
    },
    **{
        f"self_attn.{name}_proj.bias": Taken(f"{_QKV}.bias", part=(0, index, index + 1), merged=(3,))
        for index, name in enumerate("qkv")
    },
    **{
        f"{name}.weight": Taken(f"{pivot}.weight", order=() if "norm" in pivot else (1, 0))
        for name, pivot in _NAMES.items()
    },
    **{f"{name}.bias": Taken(f"{pivot}.bias") for name, pivot in _NAMES.items()},
}


def _tensors(dims: GptDims, facts: Facts) -> dict[str, Taken]:
    last = {
        f"model.decoder.final_layer_norm.{part}": Taken(f"model.final_layernorm.{part}") for part in ("weight", "bias")
    }
    return {
        "model.decoder.embed_tokens.weight": Taken("model.wte"),
        "model.decoder.embed_positions.weight": Taken("model.wpe", rows_before=_UNUSED_ROWS),
        **in_every_layer("model.decoder.layers.{layer}.", _LAYER, dims.num_layer),
        **(last if dims.has_post_decoder_layernorm else {}),
        **head_if_untied("lm_head.weight", dims, facts),
    }


def _config(dims: GptDims, facts: Facts) -> dict[str, Any]:
    return {
        "vocab_size": dims.vocab_size,
        "hidden_size": dims.hidden_units,
        "word_embed_proj_dim": dims.hidden_units,
        "num_hidden_layers": dims.num_layer,
        "num_attention_heads": dims.head_num,
        "ffn_dim": dims.inter_size,
        "max_position_embeddings": dims.max_pos_seq_len,
        "activation_function": activation(dims, facts),
        "do_layer_norm_before": dims.layernorm_type == "pre_layernorm",
        "_remove_final_layer_norm": not dims.has_post_decoder_layernorm,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "tie_word_embeddings": not is_untied(dims, facts),
    }


def _problems(dims: GptDims, facts: Facts) -> list[str]:
    is_post_norm = dims.layernorm_type == "post_layernorm"
    found = unlike(
        dims,
        positions=("learned", "it adds a table of learned positions"),
        has_pre_decoder_layernorm=(False, "no norm follows its embedding"),
        layernorm_eps=(1e-5, "its norms have an epsilon of 1e-05"),
        adapter_inter_size=(0, "it has no adapters"),
    )
    if is_post_norm and dims.has_post_decoder_layernorm:
        found.append("has_post_decoder_layernorm: True  (with norms after each half it has none after the last layer)")
    if not is_post_norm and dims.activation_type != "Relu":
        found.append(f"activation_type: {dims.activation_type}  (with norms before each half it has ReLU)")
    return found


OPT = Target("opt", "OPTForCausalLM", _tensors, _config, _problems, tied_copy)
