"""A GPT-OSS of transformers in megatron-core's words: its experts, and its configuration's fields.

Experts: megatron-core, ``transformer/moe/experts.py`` and ``mlp.py`` (``glu``: the first half of linear_fc1's rows is
the gate); the order of rows in transformers' arrays ``GptOssExperts._apply_gate``, their axes ``forward``. Fields:
Megatron-Bridge, ``gpt_oss_bridge.py``; Megatron-LM's arguments ``examples/post_training/modelopt/conf/openai``.
"""

from __future__ import annotations

from typing import Any

import torch

_QUICK_GELU = {"_target_": "megatron.core.fusions.fused_bias_geglu.quick_gelu", "_call_": False}


def experts(own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A layer's experts as SequentialMLP names them; linear_fc1 is [2, rows of gate or up, ...]."""
    made = {}
    for expert in range(len(own.get("mlp.experts.down_proj", ()))):
        base = f"mlp.experts.local_experts.{expert}."
        both = own["mlp.experts.gate_up_proj"][expert].T
        biases = own["mlp.experts.gate_up_proj_bias"][expert]
        made[f"{base}linear_fc1.weight"] = torch.stack([both[0::2], both[1::2]])
        made[f"{base}linear_fc1.bias"] = torch.stack([biases[0::2], biases[1::2]])
        made[f"{base}linear_fc2.weight"] = own["mlp.experts.down_proj"][expert].T.contiguous()
        made[f"{base}linear_fc2.bias"] = own["mlp.experts.down_proj_bias"][expert]
    return made


def fields(config: Any) -> dict[str, Any]:
    """Fields of TransformerConfig and of GPTModelProvider that a Llama has other values of."""
    if config.model_type != "gpt_oss":
        return {}
    rope = config.rope_parameters
    return {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "activation_func": _QUICK_GELU,
        "bias_activation_fusion": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config.swiglu_limit,
        "softmax_type": "learnable",
        "window_size": [config.sliding_window - 1, 0],
        "window_attn_skip_freq": 2,
        "num_moe_experts": config.num_local_experts,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": False,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_grouped_gemm": True,
        "position_embedding_type": "yarn",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": 1.0,
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_correction_range_round_to_int": rope["truncate"],
        "yarn_mscale": None,
        "yarn_mscale_all_dim": None,
    }
