"""Configurations of made-up models of every family, of transformers' classes: for benchmarks.gpu.truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


@dataclass(frozen=True)
class Shape:
    """The size of the models.

    Attributes:
        layers: blocks, of each stack.
        hidden: width; heads are hidden / 8 wide, and those of keys and values of Llama's relatives are two.
        vocab: rows of the embedding.
        window: tokens that a token sees in layers with a window.
        positions: of the longest text.
    """

    layers: int
    hidden: int
    vocab: int
    window: int
    positions: int


def _gpt2(shape: Shape, **more: Any) -> dict[str, Any]:
    own = {"n_embd": shape.hidden, "n_layer": shape.layers, "n_head": 8, "n_positions": shape.positions}
    return own | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | more


def _llama(shape: Shape, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": shape.hidden, "num_hidden_layers": shape.layers, "intermediate_size": 2 * shape.hidden}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": shape.positions}
    return sizes | heads | _SPECIAL | more


def _llama_yarn(shape: Shape) -> dict[str, Any]:
    return _llama(shape, rope_parameters=_YARN | {"original_max_position_embeddings": shape.positions // 4})


def _phi3(shape: Shape) -> dict[str, Any]:
    """Half of a head rotates, by angles and with a factor of longrope; every text is within the original length."""
    waves = shape.hidden // 32
    factors = {"short_factor": [1 + place / waves for place in range(waves)], "long_factor": [4.0] * waves}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5, **factors}
    longest = {"max_position_embeddings": 4 * shape.positions, "original_max_position_embeddings": shape.positions}
    return _llama(shape, rope_parameters=rope) | longest


def _nemotron_h(shape: Shape) -> dict[str, Any]:
    """Mamba 2, attention and feed-forwards by turns, a block a layer."""
    kinds = ["linear_attention", "mlp", "full_attention"]
    sizes = {"mamba_num_heads": 16, "mamba_head_dim": shape.hidden // 8, "n_groups": 2, "ssm_state_size": 64}
    own = {"layers_block_type": [kinds[layer % 3] for layer in range(shape.layers + 2)], "head_dim": shape.hidden // 8}
    plain = {name: value for name, value in _llama(shape).items() if name != "num_hidden_layers"}
    return plain | sizes | own


def _nemotron3(shape: Shape) -> dict[str, Any]:
    """Mamba 2, attention and experts by turns; its predictor has a layer with attention, and one with experts."""
    kinds = ["linear_attention", "moe", "full_attention"]
    middles = dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), shape.hidden // 2)
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "routed_scaling_factor": 1.5, **middles}
    layers = [kinds[layer % 3] for layer in range(shape.layers)] + kinds[:0:-1]
    predictor = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}
    return _nemotron_h(shape) | experts | predictor | {"layers_block_type": layers}


def _falcon_h1(shape: Shape) -> dict[str, Any]:
    """Mamba 2 beside attention in each layer, with numbers that multiply what goes in and out."""
    sizes = {"mamba_n_heads": 16, "mamba_d_head": shape.hidden // 8, "mamba_d_ssm": 2 * shape.hidden}
    groups = {"mamba_n_groups": 2, "mamba_d_state": 64, "head_dim": shape.hidden // 8}
    inner = {"ssm_multipliers": [0.7, 0.9, 0.8, 0.6, 0.9], "mlp_multipliers": [0.9, 0.7]}
    outer = {"key_multiplier": 0.8, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8, "lm_head_multiplier": 0.9}
    return _llama(shape) | sizes | groups | inner | outer | {"attention_out_multiplier": 0.9}


def _delta(shape: Shape, **more: Any) -> dict[str, Any]:
    """The gated delta rule, and attention in every second layer."""
    size = shape.hidden // 8
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "full_attention_interval": 2, "head_dim": size}
    return _llama(shape) | heads | {"linear_key_head_dim": size, "linear_value_head_dim": size} | more


def _qwen3_next(shape: Shape) -> dict[str, Any]:
    middles = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), shape.hidden // 2)
    return _delta(shape, num_experts=8, num_experts_per_tok=2, **middles)


def _deepseek(shape: Shape, **more: Any) -> dict[str, Any]:
    """Latent attention in layers that are all dense: a router's near-ties are another matter."""
    size, scaling = shape.hidden // 8, {"mscale": 1.0, "mscale_all_dim": 1.0}
    rope = _YARN | scaling | {"original_max_position_embeddings": shape.positions // 4}
    latent = {"kv_lora_rank": 4 * size, "qk_nope_head_dim": size, "qk_rope_head_dim": size // 2, "v_head_dim": size}
    dense = {"first_k_dense_replace": shape.layers, "num_key_value_heads": 8, "num_experts_per_tok": 2}
    return _llama(shape, rope_parameters=rope, **latent) | dense | {"num_nextn_predict_layers": 0} | more


def _opt(shape: Shape) -> dict[str, Any]:
    sizes = {"hidden_size": shape.hidden, "word_embed_proj_dim": shape.hidden, "ffn_dim": 4 * shape.hidden}
    heads = {"num_hidden_layers": shape.layers, "num_attention_heads": 8, "max_position_embeddings": shape.positions}
    return sizes | heads | _SPECIAL


def _xglm(shape: Shape) -> dict[str, Any]:
    sizes = {"d_model": shape.hidden, "ffn_dim": 4 * shape.hidden, "num_layers": shape.layers, "attention_heads": 8}
    return sizes | _SPECIAL | {"max_position_embeddings": shape.positions, "decoder_start_token_id": 2}


def _t5(shape: Shape, **more: Any) -> dict[str, Any]:
    sizes = {"d_model": shape.hidden, "d_kv": shape.hidden // 8, "d_ff": 2 * shape.hidden, "num_heads": 8}
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return sizes | ids | {"num_layers": shape.layers, "num_decoder_layers": shape.layers} | more


def _experts(shape: Shape, count: str = "num_experts", **more: Any) -> dict[str, Any]:
    """Sixteen experts, of which a token uses four, and head norms where the class has them."""
    own = {count: 16, "num_experts_per_tok": 4, "moe_intermediate_size": shape.hidden // 2}
    return _llama(shape, head_dim=shape.hidden // 8, **{**own, **more})


_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "use_qk_norm": True}


def _gpt_oss(shape: Shape) -> dict[str, Any]:
    """Every second layer has a window."""
    rope = {**_YARN, "original_max_position_embeddings": shape.positions // 4, "truncate": False}
    experts = {"num_local_experts": 16, "num_experts_per_tok": 4}
    return _llama(shape, head_dim=shape.hidden // 8, sliding_window=shape.window, rope_parameters=rope, **experts)


def _llama4(shape: Shape) -> dict[str, Any]:
    """Every second layer has experts, every second one does not rotate and attends to all; the others have chunks."""
    experts = {"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    layers = {
        "no_rope_layer_interval": 2,
        "attention_chunk_size": shape.window,
        "floor_scale": 64,
        "attn_scale": 0.1,
    }
    return _llama(shape, head_dim=shape.hidden // 8, intermediate_size_mlp=2 * shape.hidden, **experts, **layers)


# Name: class of the configuration, model_type of config.pbtxt, and its keys.
_FAMILIES: dict[str, tuple[str, str, Callable[[Shape], dict[str, Any]]]] = {
    "gpt2": ("GPT2", "GPT", _gpt2),
    "gpt_bigcode": ("GPTBigCode", "GPT", lambda s: _gpt2(s, multi_query=True)),
    "opt": ("OPT", "GPT", _opt),
    "xglm": ("XGLM", "GPT", _xglm),
    "bloom": ("Bloom", "GPT", lambda s: {"hidden_size": s.hidden, "n_layer": s.layers, "n_head": 8}),
    "gptj": ("GPTJ", "GPT-J", lambda s: _gpt2(s, rotary_dim=s.hidden // 16)),
    "gptneox": ("GPTNeoX", "GPT-NeoX", lambda s: {k: v for k, v in _llama(s).items() if k != "num_key_value_heads"}),
    "llama": (
        "Llama",
        "Llama",
        lambda s: _llama(s, rope_parameters=_LLAMA3 | {"original_max_position_embeddings": s.positions // 8}),
    ),
    "llama_yarn": ("Llama", "Llama", _llama_yarn),
    "mistral": ("Mistral", "Llama", lambda s: _llama(s, head_dim=s.hidden // 16, sliding_window=s.window)),
    "starcoder2": ("Starcoder2", "Llama", lambda s: _llama(s, sliding_window=2 * s.window)),
    "qwen2": ("Qwen2", "Llama", _llama),
    "qwen3": ("Qwen3", "Llama", lambda s: _llama(s, head_dim=s.hidden // 8)),
    "gemma": ("Gemma", "Llama", lambda s: _llama(s, head_dim=s.hidden // 8)),
    "gemma2": (
        "Gemma2",
        "Llama",
        lambda s: _llama(s, head_dim=s.hidden // 8, sliding_window=s.window, query_pre_attn_scalar=96),
    ),
    "gemma3_text": (
        "Gemma3Text",
        "Llama",
        lambda s: _llama(s, head_dim=s.hidden // 8, sliding_window=s.window, query_pre_attn_scalar=96),
    ),
    "olmo2": ("Olmo2", "Llama", _llama),
    "exaone4": (
        "Exaone4",
        "Llama",
        lambda s: _llama(s, head_dim=s.hidden // 8, sliding_window=s.window, sliding_window_pattern=3),
    ),
    "smollm3": ("SmolLM3", "Llama", lambda s: _llama(s, no_rope_layer_interval=3)),
    "granite": (
        "Granite",
        "Llama",
        lambda s: (
            _llama(s, embedding_multiplier=12.0, attention_multiplier=0.1, residual_multiplier=0.5)
            | {"logits_scaling": 2.0}
        ),
    ),
    "nemotron": ("Nemotron", "Llama", _llama),
    "phi3": ("Phi3", "Llama", _phi3),
    "deepseek_v3": ("DeepseekV3", "Llama", lambda s: _deepseek(s, q_lora_rank=3 * s.hidden // 4)),
    "deepseek_v2": ("DeepseekV2", "Llama", lambda s: _deepseek(s, q_lora_rank=None, v_head_dim=s.hidden // 16)),
    "nemotron_h": ("NemotronH", "Llama", _nemotron_h),
    "falcon_h1": ("FalconH1", "Llama", _falcon_h1),
    "qwen3_5": ("Qwen3_5Text", "Llama", _delta),
    "qwen3_next": ("Qwen3Next", "Llama", _qwen3_next),
    "mixtral": ("Mixtral", "Llama", lambda s: _experts(s, "num_local_experts", num_experts_per_tok=2)),
    "qwen3_moe": ("Qwen3Moe", "Llama", lambda s: _experts(s, norm_topk_prob=True)),
    "gpt_oss": ("GptOss", "Llama", _gpt_oss),
    "llama4": ("Llama4Text", "Llama", _llama4),
    "olmoe": ("Olmoe", "Llama", lambda s: _llama(s, num_experts=16, num_experts_per_tok=4)),
    "glm4_moe": (
        "Glm4Moe",
        "Llama",
        lambda s: _experts(s, "n_routed_experts", num_nextn_predict_layers=0, **_GROUPS),
    ),
    "deepseek_v3_mtp": ("DeepseekV3", "Llama", lambda s: _deepseek(s, q_lora_rank=None, num_nextn_predict_layers=1)),
    "glm4_moe_mtp": (
        "Glm4Moe",
        "Llama",
        lambda s: _experts(s, "n_routed_experts", num_nextn_predict_layers=1, **_GROUPS),
    ),
    "glm4_moe_lite_mtp": (
        "Glm4MoeLite",
        "Llama",
        lambda s: _deepseek(
            s,
            **{"q_lora_rank": 3 * s.hidden // 4, "num_nextn_predict_layers": 1, "n_routed_experts": 16},
            **{"moe_intermediate_size": s.hidden // 2, "mlp_layer_types": ["dense"] + ["sparse"] * (s.layers - 1)},
            first_k_dense_replace=1,
        ),
    ),
    "qwen3_5_mtp": ("Qwen3_5Text", "Llama", lambda s: _delta(s, mtp_num_hidden_layers=1)),
    "qwen3_next_mtp": ("Qwen3Next", "Llama", lambda s: _qwen3_next(s) | {"num_nextn_predict_layers": 1}),
    "nemotron3_mtp": ("NemotronH", "Llama", _nemotron3),
    "nemotron3_latent": (
        "NemotronH",
        "Llama",
        lambda s: _nemotron3(s) | {"num_nextn_predict_layers": 0, "moe_latent_size": s.hidden // 2},
    ),
    "llama_eagle3": ("Llama", "Llama", _llama_yarn),
    "qwen3_moe_eagle3": ("Qwen3Moe", "Llama", lambda s: _experts(s, norm_topk_prob=True)),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        "Llama",
        lambda s: _llama(s, moe_num_experts=16, moe_k=4, moe_intermediate_size=s.hidden // 2),
    ),
    "t5": ("T5", "T5", lambda s: _t5(s, feed_forward_proj="relu")),
    "t5_gated": ("T5", "T5", lambda s: _t5(s, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
}
FAMILIES = tuple(_FAMILIES)


def model_type_of(name: str) -> str:
    """Give config.pbtxt's model_type of a family."""
    return _FAMILIES[name][1]


def keys_of(name: str, shape: Shape) -> tuple[str, dict[str, Any]]:
    """Give transformers' class of a family, without its end, and the keys of its configuration in a shape."""
    kind, _, keys = _FAMILIES[name]
    return kind, keys(shape)
