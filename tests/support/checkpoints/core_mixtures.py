"""Mixtures of experts in megatron-core's words and names: what Megatron-Bridge's importers make of transformers'.

Fields: Megatron-Bridge 0.6, ``provider_bridge`` of ``qwen3_moe_bridge.py``, ``olmoe_bridge.py``,
``minimax_m2_bridge.py``, ``glm45_bridge.py`` and ``exaone_moe_bridge.py``; names: megatron-core, ``moe/router.py``,
``moe/shared_experts.py`` and ``moe/experts.py``. Ernie's router is its class's own: Megatron-Bridge gives it a sigmoid.
"""

from __future__ import annotations

from typing import Any

import torch

from support.tiny_models.huggingface_models import filling

State = dict[str, torch.Tensor]
PROVIDERS = {
    "olmoe": ("olmoe.olmoe_provider.OlMoEModelProvider", "olmoe.olmoe_provider.olmoe_layer_spec"),
    "minimax_m2": ("gpt_provider.GPTModelProvider", "minimax_m2.minimax_m2_provider.minimax_m2_layer_spec"),
    "ernie4_5_moe": ("gpt_provider.GPTModelProvider", "ernie.ernie_45_bridge._ernie45_decoder_block_spec"),
    "llama4_text": ("llama.llama_provider.Llama4ModelProvider", "llama.llama4_utils.get_llama4_layer_spec"),
    "exaone_moe": (
        "exaone.exaone_moe.exaone_moe_provider.ExaoneMoeModelProvider",
        "exaone.exaone_moe.exaone_moe_provider.build_exaone_moe_layer_spec",
    ),
}
"""Provider and specification of layers by model_type, below megatron.bridge.models; else those of a GPT."""
_WITH_QK_NORM = ("qwen3_moe", "olmoe", "minimax_m2", "exaone_moe")
_WITH_BIAS = ("minimax_m2", "glm4_moe", "ernie4_5_moe", "exaone_moe")


def mixture_config(config: Any) -> dict[str, Any]:
    """The fields of ``TransformerConfig`` that a mixture has beside those of any decoder."""
    family = config.model_type
    counts = ("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts")
    experts = next((getattr(config, name) for name in counts if getattr(config, name, None)), None)
    if experts is None:
        return {"num_moe_experts": None}
    own_width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    shared = [getattr(config, f"{name}_shared_experts", 0) for name in ("n", "num", "moe_num")]
    made = {
        "num_moe_experts": experts,
        "moe_router_topk": getattr(config, "moe_k", None) or config.num_experts_per_tok,
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_ffn_hidden_size": own_width,
        "moe_layer_freq": sparse_layers(config),
        "moe_grouped_gemm": True,
        "qk_layernorm": family in _WITH_QK_NORM or getattr(config, "use_qk_norm", False),
        "add_qkv_bias": family == "glm4_moe" and config.attention_bias,
        "rotary_interleaved": family == "ernie4_5_moe",
        "moe_shared_expert_intermediate_size": max(shared) * own_width or None,
        "moe_router_enable_expert_bias": family in _WITH_BIAS,
        "moe_router_score_function": "sigmoid" if family in _WITH_BIAS and family != "ernie4_5_moe" else "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss",
    }
    if family in ("glm4_moe", "exaone_moe"):
        made |= {"moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group}
        made |= {"moe_router_topk_scaling_factor": config.routed_scaling_factor}
    return made


def sparse_layers(config: Any) -> list[int]:
    """``moe_layer_freq``: 1 for each layer with experts."""
    layers = range(config.num_hidden_layers)
    if kinds := getattr(config, "mlp_layer_types", None):
        return [int(kind == "sparse") for kind in kinds]
    if config.model_type == "ernie4_5_moe":
        return [int(config.moe_layer_start_index <= layer <= config.moe_layer_end_index) for layer in layers]
    first, dense = getattr(config, "first_k_dense_replace", 0), getattr(config, "mlp_only_layers", ())
    return [int(layer >= first and layer not in dense) for layer in layers]


def mixture_state(own: State) -> State:
    """A layer's experts, router and shared experts; nothing of a layer that has one feed-forward."""
    made = {}
    for key, value in own.items():
        if key.endswith((".w1.weight", ".gate_proj.weight")) and ".experts." in key:
            place, expert, first = key.removesuffix(".weight").rsplit(".", 2)
            words = ("w1", "w3", "w2") if first == "w1" else ("gate_proj", "up_proj", "down_proj")
            made |= _gated(own, [f"{place}.{expert}.{word}" for word in words], f"mlp.experts.local_experts.{expert}")
        elif key == "mlp.shared_experts.gate_proj.weight":
            words = ("gate_proj", "up_proj", "down_proj")
            made |= _gated(own, [f"mlp.shared_experts.{word}" for word in words], "mlp.shared_experts")
        elif key in ("mlp.gate.weight", "block_sparse_moe.gate.weight"):
            made["mlp.router.weight"] = value
        elif key.endswith("e_score_correction_bias"):
            made["mlp.router.expert_bias"] = value.reshape(-1).float()
    return made


def _gated(own: State, names: list[str], place: str) -> State:
    gate, up, down = (own[f"{name}.weight"] for name in names)
    return {f"{place}.linear_fc1.weight": torch.stack([gate, up]), f"{place}.linear_fc2.weight": down}


def fill_choice_biases(model: Any) -> None:
    """Give a model's biases for choosing numbers that change what is chosen; transformers keeps some as buffers."""
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            value.data.copy_(torch.from_numpy(filling(name, tuple(value.shape))))
