"""Latent attention and predictors of further tokens in the names of megatron-core.

Written from megatron-core 0.20 (``transformer/multi_latent_attention.py``, ``multi_token_prediction.py``,
``models/gpt/gpt_layer_specs.py``), not from this project's tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

State = dict[str, torch.Tensor]

ROWS = ("linear_q_proj.weight", "linear_q_up_proj.weight", "linear_kv_up_proj.weight", "eh_proj.weight")
"""Ends of keys of layers whose weight is cut by rows; Transformer Engine's down projections are not."""
LAST = "model.layers.3."
"""Where the predictor is: behind three layers."""
_LINEAR = {
    **{"q_proj": "linear_q_proj", "q_a_proj": "linear_q_down_proj", "q_b_proj": "linear_q_up_proj"},
    **{"kv_a_proj_with_mqa": "linear_kv_down_proj", "kv_b_proj": "linear_kv_up_proj", "o_proj": "linear_proj"},
}
_FUSED_NORMS = {"q_a_layernorm": "linear_q_up_proj.layer_norm_", "kv_a_layernorm": "linear_kv_up_proj.layer_norm_"}
QUERY_RANK = 20
"""That of the model ``deepseek_v3``."""


def is_latent(own: State) -> bool:
    """Whether a layer has latent attention."""
    return "self_attn.kv_a_proj_with_mqa.weight" in own


def layer(own: State) -> State:
    """Name a layer's attention and norms as Transformer Engine's specification does.

    The norm before attention stands alone; that before the feed-forward is fused into a dense one.
    """
    made = {"input_layernorm.weight": own["input_layernorm.weight"]}
    is_sparse = any("experts" in key for key in own)
    made["pre_mlp_layernorm.weight" if is_sparse else "mlp.linear_fc1.layer_norm_weight"] = own[
        "post_attention_layernorm.weight"
    ]
    for theirs, ours in _LINEAR.items():
        if f"self_attn.{theirs}.weight" in own:
            made[f"self_attention.{ours}.weight"] = own[f"self_attn.{theirs}.weight"]
    for theirs, ours in _FUSED_NORMS.items():
        if f"self_attn.{theirs}.weight" in own:
            made[f"self_attention.{ours}weight"] = own[f"self_attn.{theirs}.weight"]
    return made


def predictors(tensors: State, config: Any) -> int:
    """How many predictors the files have."""
    behind = (f"model.layers.{config.num_hidden_layers + number}.eh_proj.weight" for number in range(4))
    return sum(name in tensors for name in behind)


def with_predictor(found: State) -> State:
    """Add a predictor as DeepSeek's files have it: the last layer's tensors, changed, and what leads in and out."""
    rng = np.random.default_rng(7)
    last = {key: value for key, value in found.items() if key.startswith("model.layers.2.")}
    made = {key.replace("model.layers.2.", LAST): value.flip(0) for key, value in last.items()}
    width, dtype = found["model.norm.weight"].shape[0], found["model.norm.weight"].dtype
    for name, shape in (("enorm", (width,)), ("hnorm", (width,)), ("eh_proj", (width, 2 * width))):
        made[f"{LAST}{name}.weight"] = torch.from_numpy(rng.standard_normal(shape)).to(dtype)
    made[f"{LAST}shared_head.norm.weight"] = found["model.norm.weight"].flip(0)
    made[f"{LAST}shared_head.head.weight"] = found["lm_head.weight"].clone()
    made[f"{LAST}embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
    return {**found, **{key: value.contiguous() for key, value in made.items()}}


def predictor(own: State) -> State:
    """Name what a predictor has beside its layer; embedding and head are the model's."""
    made = {f"{name}.weight": own[f"{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
    return made | {"final_layernorm.weight": own["shared_head.norm.weight"]}


def local_names(state: State) -> State:
    """The names of megatron-core's local specification, which fuses no norms."""
    names = {
        "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
        "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }
    made = {}
    for key, value in state.items():
        for fused, alone in names.items():
            key = key.replace(fused, alone)
        made[key] = value
    return made


def fused_down(state: State) -> State:
    """What ``mla_down_proj_fusion`` holds in memory and rank files: one matrix leads down, with the norm before it."""
    made = dict(state)
    for key in state:
        base, found, _ = key.partition("self_attention.linear_q_down_proj.weight")
        if found:
            place = f"{base}self_attention.linear_qkv_down_proj."
            parts = [made.pop(f"{base}self_attention.linear_{each}_down_proj.weight") for each in ("q", "kv")]
            made[f"{place}weight"] = torch.cat(parts)
            made[f"{place}layer_norm_weight"] = made.pop(f"{base}input_layernorm.weight")
    return made


def fused_part(value: torch.Tensor, ranks: int, rank: int) -> torch.Tensor:
    """One rank's part of the matrix that leads down: its rows for the queries above those for keys and values."""
    return torch.cat([part.chunk(ranks)[rank] for part in value.split([QUERY_RANK, len(value) - QUERY_RANK])])


def fields(config: Any) -> dict[str, Any]:
    """What ``MLATransformerConfig`` says of a model; Megatron-LM's arguments have the same names."""
    if not hasattr(config, "kv_lora_rank"):
        return {"multi_latent_attention": False}
    rope = config.rope_parameters
    scaling = {"rope_type": "rope", "rotary_scaling_factor": 1.0}
    if rope["rope_type"] == "yarn":
        same = ("original_max_position_embeddings", "mscale", "mscale_all_dim")
        scaling = {"rope_type": "yarn", "rotary_scaling_factor": rope["factor"], **{key: rope[key] for key in same}}
        scaling |= {"beta_fast": rope.get("beta_fast", 32.0), "beta_slow": rope.get("beta_slow", 1.0)}
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "kv_channels": config.hidden_size // config.num_attention_heads,
        **scaling,
        "mtp_num_layers": getattr(config, "num_nextn_predict_layers", 0) or None,
        **_experts(config),
    }


def _experts(config: Any) -> dict[str, Any]:
    """What DeepSeek's importers say of the experts, and no other family's."""
    is_v2 = config.model_type == "deepseek_v2"
    has_groups = not is_v2 and config.n_group > 1
    return {
        "moe_router_pre_softmax": True,
        "moe_router_score_function": "softmax" if is_v2 else "sigmoid",
        "moe_router_enable_expert_bias": not is_v2,
        "moe_router_num_groups": config.n_group if has_groups else None,
        "moe_router_group_topk": config.topk_group if has_groups else None,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
    }
