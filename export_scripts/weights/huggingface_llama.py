"""Hugging Face Llama, Mistral, Nemotron, Qwen2, Qwen3, Gemma, Gemma 2, StarCoder2 and Mixtral as the Llama family.

Keys: transformers, ``models/{llama,mistral,...}/modeling_*.py``. All rotate the halves of a head, as the family does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from export_scripts.weights.architecture import Architecture, Settings, in_layers
from export_scripts.weights.layouts import transposed, unchanged
from export_scripts.weights.llama_layouts import attention_output, key_or_value, query
from export_scripts.weights.llama_settings import ALTERNATE, BEHIND_THE_FIRST, EVERY, LISTED, Gemma, Gemma2, Relative
from export_scripts.weights.schema import LlamaDims, Rule, Rules, SourceMap
from ft_format.families import llama
from ft_format.families.llama_dims import LAYER_NORM

_LINEAR = {
    "self_attn.q_proj": ("attention.query", query),
    "self_attn.k_proj": ("attention.key", key_or_value),
    "self_attn.v_proj": ("attention.value", key_or_value),
    "self_attn.o_proj": ("attention.dense", attention_output),
}
_FEED_FORWARD = {"mlp.gate_proj": "mlp.gate_proj", "mlp.up_proj": "mlp.up_proj", "mlp.down_proj": "mlp.down_proj"}
_NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
_GEMMA2_NORMS = {
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "attention_output_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "mlp_output_layernorm",
}
_QK_NORMS = {"self_attn.q_norm": "attention.query_norm", "self_attn.k_norm": "attention.key_norm"}
_STARCODER2 = {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _table(name: str, norms: Mapping[str, str], feed_forward: Mapping[str, str]) -> SourceMap:
    layer: dict[str, Rules] = {}
    for key, target in norms.items():
        layer |= {f"{key}.{kind}": Rule(f"{target}.{kind}", unchanged) for kind in ("weight", "bias")}
    for key, (target, layout) in _LINEAR.items():
        layer[f"{key}.weight"] = Rule(f"{target}.weight", layout)
        is_output = layout is attention_output
        layer[f"{key}.bias"] = Rule(f"{target}.bias", unchanged if is_output else layout)
    for key, target in feed_forward.items():
        layer[f"{key}.weight"] = Rule(f"{target}.weight", transposed)
        layer[f"{key}.bias"] = Rule(f"{target}.bias", unchanged)
    return SourceMap(
        name=f"Hugging Face {name}",
        rules={
            "embed_tokens.weight": Rule(llama.EMBEDDING_FILE, unchanged),
            "norm.weight": Rule("model.final_layernorm.weight", unchanged),
            "norm.bias": Rule("model.final_layernorm.bias", unchanged),
            "lm_head.weight": Rule(llama.HEAD_FILE, unchanged),
            **in_layers("layers.{layer}.", layer),
        },
        ignored={"*rotary_emb.inv_freq": "frequencies, which are computed"},
    )


def _with_experts(table: SourceMap, settings: Settings) -> SourceMap:
    """Name the tensors of every expert: their number is the configuration's."""
    base = "block_sparse_moe"
    layer: dict[str, Rules] = {f"{base}.gate.weight": Rule("mlp.router.weight", transposed)}
    for expert in range(settings.size("num_local_experts", default=8)):
        for key, target in _EXPERT.items():
            layer[f"{base}.experts.{expert}.{key}.weight"] = Rule(f"mlp.experts.{expert}.{target}.weight", transposed)
    return replace(table, rules={**table.rules, **in_layers("layers.{layer}.", layer)})


class _Mixtral(Relative):
    def dims(self, settings: Settings) -> LlamaDims:
        """Read the dimensions; see ``Relative.dims``."""
        experts = settings.size("num_local_experts", default=8)
        used = settings.size("num_experts_per_tok", default=2)
        return replace(super().dims(settings), expert_num=experts, experts_per_token=used)


def _architecture(model_type: str, table: SourceMap, relative: Relative, is_tied: bool = False) -> Architecture:
    return Architecture(
        model_type=model_type,
        family=llama.FAMILY,
        source_map=table,
        dims=relative.dims,
        prefix="model.",
        embedding="embed_tokens.weight",
        has_tied_head=is_tied,
        has_windows=bool(relative.window),
        more_problems=relative.problems,
    )


LLAMA = _architecture(
    "llama",
    _table("Llama", _NORMS, _FEED_FORWARD),
    Relative(bias_key="attention_bias", mlp_bias_key="mlp_bias"),
)
MISTRAL = _architecture(
    "mistral",
    _table("Mistral", _NORMS, _FEED_FORWARD),
    Relative(
        {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
        window=LISTED,  # with layer_types transformers takes its Ministral, whose layers those are
    ),
)
NEMOTRON = _architecture(
    "nemotron",
    _table("Nemotron", _NORMS, _FEED_FORWARD),
    Relative(
        {
            "hidden_act": "relu2",
            "partial_rotary_factor": 0.5,
            "norm_eps": 1e-5,
            "max_position_embeddings": 4096,
        },
        {"layernorm_type": LAYER_NORM, "has_zero_centred_norms": True, "is_gated": False},
        bias_key="attention_bias",
        mlp_bias_key="mlp_bias",
        eps_key="norm_eps",
        is_partly_rotated=True,
    ),
)
_QWEN = {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
QWEN2 = _architecture(
    "qwen2",
    _table("Qwen2", _NORMS, _FEED_FORWARD),
    Relative({**_QWEN, "num_key_value_heads": 32}, {"has_qkv_bias": True}, window=BEHIND_THE_FIRST),
)
QWEN3 = _architecture(
    "qwen3",
    _table("Qwen3", {**_NORMS, **_QK_NORMS}, _FEED_FORWARD),
    Relative(
        {**_QWEN, "num_key_value_heads": 32, "head_dim": 128},
        {"qk_norm": True},
        bias_key="attention_bias",
        window=BEHIND_THE_FIRST,
    ),
)
_GEMMA = {"head_dim": 256, "max_position_embeddings": 8192}
GEMMA = _architecture(
    "gemma",
    _table("Gemma", _NORMS, _FEED_FORWARD),
    Gemma(
        {**_GEMMA, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
        {"has_zero_centred_norms": True},
        bias_key="attention_bias",
    ),
    is_tied=True,
)
GEMMA2 = _architecture(
    "gemma2",
    _table("Gemma 2", _GEMMA2_NORMS, _FEED_FORWARD),
    Gemma2(
        {
            **_GEMMA,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        {"has_zero_centred_norms": True, "has_output_norms": True},
        bias_key="attention_bias",
        window=ALTERNATE,
        function_key="hidden_activation",
    ),
    is_tied=True,
)
STARCODER2 = _architecture(
    "starcoder2",
    _table("StarCoder2", _NORMS, _STARCODER2),
    Relative(
        {
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "sliding_window": None,
        },
        {"layernorm_type": LAYER_NORM, "is_gated": False},
        bias_key="use_bias",
        mlp_bias_key="use_bias",
        eps_key="norm_epsilon",
        window=EVERY,
    ),
    is_tied=True,
)
MIXTRAL = replace(
    _architecture(
        "mixtral",
        _table("Mixtral", _NORMS, {}),
        _Mixtral(
            {
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "sliding_window": None,
            },
            window=EVERY,
        ),
    ),
    adapt=_with_experts,
    aliases={"num_experts": "num_local_experts"},
)
LLAMA_FAMILY = (LLAMA, MISTRAL, NEMOTRON, QWEN2, QWEN3, GEMMA, GEMMA2, STARCODER2, MIXTRAL)
