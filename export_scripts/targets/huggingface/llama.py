"""The Llama family as transformers' Llama, Mistral, Nemotron, Qwen2, Qwen3, Gemma, Gemma 2, StarCoder2 and Mixtral.

Names and shapes: transformers, ``models/{llama,mistral,...}/modeling_*.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from export_scripts.targets.huggingface.llama_kind import NORMS, Kind, make_target
from ft_format.families.llama_dims import LAYER_NORM, RMS_NORM, LlamaDims

_GEMMA2_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "attention_output_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_layernorm",
}
_QK_NORMS = {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}
_PLAIN = {"mlp.up_proj": "mlp.up_proj", "mlp.down_proj": "mlp.down_proj"}
_STARCODER2 = {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
_OF_LLAMA = {
    "layernorm_type": RMS_NORM,
    "is_gated": True,
    "qk_norm": False,
    "has_output_norms": False,
    "embedding_scale": 1.0,
    "attention_scalar": 0.0,
    "attn_logit_softcap": 0.0,
    "final_logit_softcap": 0.0,
    "expert_num": 0,
}
_OF_GEMMA = {key: value for key, value in _OF_LLAMA.items() if key != "embedding_scale"}
_CAPS = ("attention_scalar", "attn_logit_softcap", "final_logit_softcap")


def _alike(key: str, *, with_mlp: bool = False) -> Callable[[bool, bool, bool], dict[str, Any] | None]:
    """Make the rule of an architecture whose one key means all biases of attention, or those of all linear layers."""

    def said(qkv: bool, dense: bool, mlp: bool) -> dict[str, Any] | None:
        is_alike = qkv == dense and (qkv == mlp if with_mlp else not mlp)
        return {key: qkv} if is_alike else None

    return said


def _of_attention_and_mlp(qkv: bool, dense: bool, mlp: bool) -> dict[str, Any] | None:
    return {"attention_bias": qkv, "mlp_bias": mlp} if qkv == dense else None


def _of_qwen2(qkv: bool, dense: bool, mlp: bool) -> dict[str, Any] | None:
    return {} if qkv and not dense and not mlp else None


def _caps(dims: LlamaDims) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _whole(dims.attention_scalar or dims.size_per_head),
        "attn_logit_softcapping": dims.attn_logit_softcap or None,
        "final_logit_softcapping": dims.final_logit_softcap or None,
    }


def _whole(value: float) -> float | int:
    """Give a whole number without a fraction, as transformers' type of the key demands."""
    return int(value) if value == int(value) else value


def _experts(dims: LlamaDims) -> dict[str, Any]:
    return {"num_local_experts": dims.expert_num, "num_experts_per_tok": dims.experts_per_token}


LLAMA = make_target("llama", "LlamaForCausalLM", Kind(_OF_LLAMA, biases=_of_attention_and_mlp))
MISTRAL = make_target("mistral", "MistralForCausalLM", Kind(_OF_LLAMA, window="all"))
QWEN2 = make_target("qwen2", "Qwen2ForCausalLM", Kind(_OF_LLAMA, biases=_of_qwen2, window="some"))
QWEN3 = make_target(
    "qwen3",
    "Qwen3ForCausalLM",
    Kind({**_OF_LLAMA, "qk_norm": True}, {**NORMS, **_QK_NORMS}, biases=_alike("attention_bias"), window="some"),
)
NEMOTRON = make_target(
    "nemotron",
    "NemotronForCausalLM",
    Kind(
        {**_OF_LLAMA, "layernorm_type": LAYER_NORM, "is_gated": False, "has_zero_centred_norms": True},
        feed_forward=_PLAIN,
        stores_less_one=True,
        biases=_of_attention_and_mlp,
        eps_key="norm_eps",
        is_partly_rotated=True,
    ),
)
STARCODER2 = make_target(
    "starcoder2",
    "Starcoder2ForCausalLM",
    Kind(
        {**_OF_LLAMA, "layernorm_type": LAYER_NORM, "is_gated": False},
        feed_forward=_STARCODER2,
        biases=_alike("use_bias", with_mlp=True),
        window="all",
        eps_key="norm_epsilon",
        needs_square_heads=True,
    ),
)
GEMMA = make_target(
    "gemma",
    "GemmaForCausalLM",
    Kind(
        _OF_GEMMA,
        stores_less_one=True,
        biases=_alike("attention_bias"),
        is_scaled=True,
        function_keys=("hidden_act", "hidden_activation"),
        exact_gelu="gelu_python",
    ),
)
GEMMA2 = make_target(
    "gemma2",
    "Gemma2ForCausalLM",
    Kind(
        {**{key: value for key, value in _OF_GEMMA.items() if key not in _CAPS}, "has_output_norms": True},
        _GEMMA2_NORMS,
        stores_less_one=True,
        biases=_alike("attention_bias"),
        window="some",
        is_scaled=True,
        function_keys=("hidden_act", "hidden_activation"),
        exact_gelu="gelu_python",
        more=_caps,
    ),
)
_OF_MIXTRAL = {key: value for key, value in _OF_LLAMA.items() if key != "expert_num"}
MIXTRAL = make_target("mixtral", "MixtralForCausalLM", Kind(_OF_MIXTRAL, feed_forward={}, window="all", more=_experts))
LLAMA_FAMILY = (LLAMA, MISTRAL, QWEN2, QWEN3, NEMOTRON, STARCODER2, GEMMA, GEMMA2, MIXTRAL)
"""The first that can express a model is taken: Llama before Mistral, whose only difference is the window."""
