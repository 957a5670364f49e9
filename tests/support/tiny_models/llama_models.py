"""Tiny models of the Llama-like families, built by transformers, in which every tensor matters.

All have 2 layers, a hidden size of 64, 8 heads and a vocabulary of 120; each differs where its family does.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from support.checkpoints.core_mixtures import fill_choice_biases
from support.tiny_models.huggingface_models import filling

FP32 = "e_score_correction_bias"
"""What transformers keeps in fp32 in any model."""
HIDDEN, HEADS, GROUPS, LAYERS, VOCAB, INTER, POSITIONS, EXPERTS = 64, 8, 4, 2, 120, 96, 64, 4
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "intermediate_size": INTER,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rope(theta: float = 10000.0, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **others}}


_GROUPED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
}
_LATENT = {
    **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": HEADS, "q_lora_rank": None},
    "num_nextn_predict_layers": 0,
    **{"kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
}
_MIXTURE = {"n_routed_experts": EXPERTS, "moe_intermediate_size": 40, "n_shared_experts": 1}
_GLM = {**_GROUPED, "n_routed_experts": 12, "num_nextn_predict_layers": 0}
_MAMBA: dict[str, Any] = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 6, "chunk_size": 8, "head_dim": 16},
    **{"time_step_min": 1e-30, "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"]},
}
_MAMBA_MOE = {
    **{"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "num_experts_per_tok": 2},
    **{"n_routed_experts": EXPERTS, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size": 56},
    "routed_scaling_factor": 2.5,
}
_FALCON: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 4, "mamba_d_ssm": 32, "mamba_n_groups": 2, "mamba_d_state": 6},
    **{"mamba_chunk_size": 8, "mamba_norm_before_gate": False, "head_dim": 16, **_rope(1e11)},
    **{"embedding_multiplier": 2.5, "lm_head_multiplier": 0.3, "key_multiplier": 0.7, "attention_in_multiplier": 0.9},
    **{"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6},
    **{"ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.31], "mlp_multipliers": [0.88, 0.29]},
}
_DELTA: dict[str, Any] = {
    **{"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 6, "linear_conv_kernel_dim": 3, "full_attention_interval": 3, "num_hidden_layers": 4},
    **_rope(1e6, partial_rotary_factor=0.25),
}
_DELTA_MOE = {
    **{"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "shared_expert_intermediate_size": 56,
}
_CHUNKED = ["chunked_attention"] * 4
_LLAMA4: dict[str, Any] = {
    **{"num_hidden_layers": 4, "head_dim": 16, "intermediate_size": 40, "intermediate_size_mlp": INTER},
    **{"num_local_experts": EXPERTS, "num_experts_per_tok": 1, "no_rope_layer_interval": 4, "rms_norm_eps": 1e-5},
    **{"attention_chunk_size": 5, "floor_scale": 3, "attn_scale": 0.4, **_rope(5e5)},
}
# So that Mamba's part of a layer of Falcon-H1 is as large as attention's.
LOUD = {"ssm_in_multiplier": 8.0, "ssm_out_multiplier": 5.0, "ssm_multipliers": [1.3, 2.5, 1.8, 1.5, 1.1]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_mha": ("Llama", {"num_key_value_heads": HEADS, "rms_norm_eps": 1e-5}),
    "llama": ("Llama", {"rms_norm_eps": 1e-5}),
    "llama_linear": ("Llama", {"rms_norm_eps": 1e-5, **_rope(rope_type="linear", factor=4.0)}),
    "llama_yarn": ("Llama", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama_dynamic": ("Llama", _rope(rope_type="dynamic", factor=4.0)),
    "llama_longrope": (
        "Llama",
        {
            "max_position_embeddings": 32,
            **_rope(
                rope_type="longrope",
                short_factor=[1.0, 2.0, 3.0, 5.0],
                long_factor=[2.0] * 4,
                factor=8.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "llama31": ("Llama", {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_parameters": _LLAMA3}),
    "llama32": (
        "Llama",
        {
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_parameters": {**_LLAMA3, "factor": 32.0},
        },
    ),
    "mistral": ("Mistral", {"rms_norm_eps": 1e-5, "head_dim": 16, "sliding_window": 5, **_rope(1e6)}),
    "nemotron": ("Nemotron", {"norm_eps": 1e-5, "head_dim": 8, **_rope(partial_rotary_factor=0.5)}),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-5, **_rope(1e6)}),
    "qwen3": ("Qwen3", {"rms_norm_eps": 1e-6, "head_dim": 16, **_rope(1e6)}),
    "gemma": ("Gemma", {"rms_norm_eps": 1e-5, "head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "Gemma2",
        {
            "rms_norm_eps": 1e-6,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 24,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            },
        },
    ),
    "olmo2": ("Olmo2", {"rms_norm_eps": 1e-5, **_rope(5e5)}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            **_rope(1e5),
        },
    ),
    "phi3_plain": ("Phi3", {"rms_norm_eps": 1e-5, **_rope(5e3)}),
    "phi3": (
        "Phi3",
        {
            "original_max_position_embeddings": 8,
            "sliding_window": 5,
            **_rope(
                rope_type="longrope",
                partial_rotary_factor=0.5,
                short_factor=[1.0, 2.0],
                long_factor=[3.0, 4.0],
            ),
        },
    ),
    "smollm3": (
        "SmolLM3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 5, **_rope(2e6)},
    ),
    "exaone4": ("Exaone4", {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 2, **_rope(1e6)}),
    "exaone4_full": (
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS, **_rope(1e6)},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, **_rope(1e6)}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            **_rope(1e6),
        },
    ),
    "qwen3_moe_alike": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 40, **_rope(1e6)},
    ),
    "olmoe": ("Olmoe", {"rms_norm_eps": 1e-5, "num_experts": EXPERTS, "num_experts_per_tok": 3, "clip_qkv": None}),
    "glm4_moe": ("Glm4Moe", {**_GLM, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe_air": ("Glm4Moe", {**_GLM, "n_group": 1, "topk_group": 1}),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            **_rope(5e6, partial_rotary_factor=0.5),
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"num_hidden_layers": 3, "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 40, **_rope(5e5)},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        {**_GROUPED, "num_experts": 12, "sliding_window": 5, "sliding_window_pattern": 2, **_rope(1e6)},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **{**_LATENT, **_MIXTURE, "q_lora_rank": 20, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
            **_rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.0, mscale_all_dim=1.0),
        },
    ),
    "moonlight": (
        "DeepseekV3",
        {
            **{**_LATENT, **_MIXTURE, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "n_shared_experts": 2},
            **{"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446, **_rope(50000.0)},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **{**_LATENT, **_MIXTURE, "q_lora_rank": 20, "num_experts_per_tok": 2, "routed_scaling_factor": 1.8},
            **_rope(1e6),
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **{**_LATENT, **_MIXTURE, "n_shared_experts": 2, "num_experts_per_tok": 3, "topk_method": "greedy"},
            **_rope(
                rope_type="yarn", factor=40.0, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.707
            ),
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "intermediate_size": HIDDEN,  # as in the published models: shapes do not show which axis is which
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "swiglu_limit": 0.25,
            **_rope(150000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        },
    ),
    "nemotron_h": ("NemotronH", _MAMBA),
    "nemotron3": ("NemotronH", {**_MAMBA, **_MAMBA_MOE}),
    "nemotron3_latent": ("NemotronH", {**_MAMBA, **_MAMBA_MOE, "moe_latent_size": 24}),
    "falcon_h1": ("FalconH1", _FALCON),
    "falcon_h1_norm": ("FalconH1", {**_FALCON, "mamba_rms_norm": True, "tie_word_embeddings": True}),
    "qwen3_next": ("Qwen3Next", {**_DELTA, **_DELTA_MOE, "mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5Text", {**_DELTA, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("Qwen3_5MoeText", {**_DELTA, **_DELTA_MOE}),
    "llama4": ("Llama4Text", {**_LLAMA4, "interleave_moe_layer_step": 2}),
    "llama4_plain": (
        "Llama4Text",
        {
            **{**_LLAMA4, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "use_qk_norm": False},
            **{"attn_temperature_tuning": False, "layer_types": ["full_attention"] * 4},
        },
    ),
    "llama4_scout": ("Llama4Text", {**_LLAMA4, "attn_temperature_tuning": False, "layer_types": _CHUNKED}),
    "starcoder2": ("Starcoder2", {"norm_epsilon": 1e-5, "sliding_window": 5, **_rope(1e5)}),
}
"""Name of a model -> transformers' class and what differs from the common sizes."""


def unfilled(name: str, **changes: Any) -> Any:
    """Build a model in fp32."""
    import transformers

    family, dims = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**_SIZES, **dims, **changes})
    config._attn_implementation = "eager"
    return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()


def build(name: str, **changes: Any) -> Any:
    """Build a model in fp32 with every weight filled, norms too; biases and norms are far from 0 and 1."""
    model = unfilled(name, **changes)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_values(key, tuple(parameter.shape))))
    fill_choice_biases(model)
    return model


def _values(key: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms are multiples of 1/64, so that 1 more is exact in bfloat16 (NeMo 1 stores Gemma's so)."""
    values = filling(key, shape)
    if "norm" in key:
        return (np.round(values * 64) / 64).astype(np.float32)
    return values if "embed" in key else values * np.float32(0.75)


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a model as the hub has it, without a tokenizer, and return it in fp32 with the saved values.

    It is read again: a model that was once in bfloat16 keeps its rotary frequencies so.
    """
    import transformers

    model = build(name, **changes)
    kept = {key: value.data.clone() for key, value in model.state_dict(keep_vars=True).items() if key.endswith(FP32)}
    for key, value in model.to(dtype).state_dict(keep_vars=True).items():
        value.data = kept.get(key, value.data)
    model.save_pretrained(folder)
    given = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **given).eval()


@dataclass(frozen=True)
class Saved:
    """A model as transformers wrote and computes it.

    Attributes:
        config: transformers' configuration.
        tensors: what is in its safetensors files, under the hub's names.
        logits: [2, 12, vocab] of ``input_ids``, in fp32.
    """

    config: Any
    tensors: dict[str, torch.Tensor]
    logits: np.ndarray


@cache
def saved(name: str, dtype: torch.dtype = torch.float32) -> Saved:
    """Build and save a model once for all tests of a process."""
    with tempfile.TemporaryDirectory() as folder:
        model = save(name, Path(folder), dtype)
        return Saved(model.config, tensors(Path(folder)), logits(model))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read the tensors that transformers wrote, under the names that the hub has."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def input_ids() -> np.ndarray:
    """Two prompts [2, 12], longer than the sliding windows."""
    return np.random.default_rng(18).integers(3, VOCAB, (2, 12))


def logits(model: Any) -> np.ndarray:
    """Compute transformers' logits [2, 12, vocab] of those prompts."""
    with torch.no_grad():
        result: np.ndarray = model(torch.from_numpy(input_ids())).logits.float().numpy()
    return result
