"""What NeMo 1, NeMo 2 and Megatron-LM say of a Llama-like model, by their importers' own rules.

NeMo 1: ``load_config`` of scripts/checkpoint_converters/convert_*_hf_to_nemo.py over the published configurations.
NeMo 2: the ``config`` property of each importer in nemo/collections/llm/gpt/model. Megatron-LM: its own arguments.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.checkpoints import core_gpt_oss, core_latent, core_llama4
from support.checkpoints.core_mixtures import PROVIDERS, mixture_config
from support.checkpoints.llama_files import TOKENIZER_FILE

PUBLISHED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "data/nemo_configs.json").read_text())
_BASE = "nemo.collections.llm.gpt.model"
_TARGETS = {
    "llama": "llama.Llama2Config7B",
    "llama31": "llama.Llama31Config8B",
    "llama32": "llama.Llama32Config1B",
    "mistral": "mistral.MistralConfig7B",
    "nemotron": "nemotron.Nemotron3Config4B",
    "qwen2": "qwen2.Qwen2Config7B",
    "qwen3": "qwen3.Qwen3Config8B",
    "gemma": "gemma.GemmaConfig2B",
    "gemma2": "gemma2.Gemma2Config2B",
    "mixtral": "mixtral.MixtralConfig8x7B",
    "qwen3_moe": "qwen3.Qwen3Config30B_A3B",
    "starcoder2": "starcoder2.Starcoder2Config3B",
    "gpt_oss": "gpt_oss.GPTOSSConfig20B",
    "deepseek_v2": "deepseek.DeepSeekV2Config",
    "deepseek_v3": "deepseek.DeepSeekV3Config",
    "moonlight": "deepseek.MoonlightConfig16B",
    "phi3": "phi3mini.Phi3ConfigMini",
}
_MODELS = {
    "llama": "LlamaModel",
    "mistral": "MistralModel",
    "nemotron": "NemotronModel",
    "qwen2": "Qwen2Model",
    "qwen3": "Qwen3Model",
    "gemma": "GemmaModel",
    "gemma2": "Gemma2Model",
    "mixtral": "MixtralModel",
    "starcoder2": "Starcoder2Model",
    "gpt_oss": "GPTOSSModel",
    "phi3": "Phi3Model",
    "qwen3_moe": "Qwen3MoEModel",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "DeepSeekModel"),
}
_TOKENIZER = {
    "library": "sentencepiece",
    "type": None,
    "model": f"nemo:{TOKENIZER_FILE}",
    "vocab_file": None,
    "merge_file": None,
    "delimiter": None,
    "sentencepiece_legacy": False,
}
_FUNCTIONS = {
    "silu": "torch.nn.functional.silu",
    "relu2": "megatron.core.activations.squared_relu",
    "gelu_pytorch_tanh": "nemo.collections.llm.fn.activation.openai_gelu",
}


def padded_vocabulary(config: Any, ranks: int) -> int:
    """Rows of the embedding: a multiple of ``make_vocab_size_divisible_by`` times the ranks."""
    multiple = divisible_by(config) * ranks
    return -(-config.vocab_size // multiple) * multiple


def divisible_by(config: Any) -> int:
    """The largest power of two up to 128 that divides the vocabulary, as the importers take it."""
    base = 128
    while config.vocab_size % base:
        base //= 2
    return base


def epsilon(config: Any) -> float:
    """The norms' epsilon, whatever the family calls it."""
    names = ("rms_norm_eps", "norm_eps", "norm_epsilon")
    return float(next(getattr(config, name) for name in names if hasattr(config, name)))


def head_size(config: Any) -> int | None:
    """``kv_channels``: given where it is not the hidden size by the heads."""
    size = getattr(config, "head_dim", None)
    return size if size and size * config.num_attention_heads != config.hidden_size else None


def window(config: Any) -> int | None:
    """The sliding window; Qwen's configurations name one that they do not use."""
    return (
        getattr(config, "sliding_window", None)
        if config.model_type not in ("qwen2", "qwen3", "mixtral", "qwen3_moe")
        else None
    )


def core_window(config: Any) -> list[int] | None:
    """``window_size`` of megatron-core: the tokens before a token, which transformers counts with itself."""
    return [size - 1, 0] if (size := window(config)) else None


def nemo1(config: Any, grid: tuple[int, int] = (1, 1), **changes: Any) -> dict[str, Any]:
    """``model_config.yaml`` of a ``.nemo``.

    Args:
        config: transformers' configuration.
        grid: training's tensor and pipeline parallelism.
        changes: keys to set besides.
    """
    family, rope = config.model_type, config.rope_parameters
    is_scaled = rope["rope_type"] == "llama3"
    made = {**PUBLISHED["every"], **PUBLISHED["llama3_1" if is_scaled else family]}
    made |= {
        "encoder_seq_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "layernorm_epsilon": epsilon(config),
        "init_method_std": config.initializer_range,
        "make_vocab_size_divisible_by": divisible_by(config),
        "tensor_model_parallel_size": grid[0],
        "pipeline_model_parallel_size": grid[1],
        "rotary_base": rope["rope_theta"],
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "kv_channels": head_size(config),
        "tokenizer": _TOKENIZER,
        "target": "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel",
        "nemo_version": "2.0.0",
    }
    made |= _nemo1_of_family(config)
    if rope["rope_type"] == "linear":
        made["seq_len_interpolation_factor"] = rope["factor"]
    if is_scaled and rope["factor"] != 8:
        made["scale_factor"] = rope["factor"]
    return {**made, **changes}


def _nemo1_of_family(config: Any) -> dict[str, Any]:
    family = config.model_type
    if family == "gemma2":
        names = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
        custom = {name: getattr(config, name) for name in names}
        return {
            "window_size": [config.sliding_window, 0],
            "mcore_customization_config": custom,
            "name": "megatron_gemma2",
        }
    if family == "mixtral":
        experts = {"num_moe_experts": config.num_local_experts, "moe_router_topk": config.num_experts_per_tok}
        return {**experts, "moe_router_pre_softmax": False}
    if family == "qwen2":
        return {"override_vocab_size": config.vocab_size}
    return {"window_size": [window(config), 0]} if window(config) else {}


def architecture(config: Any) -> dict[str, Any]:
    """megatron-core's TransformerConfig, field by field."""
    family = config.model_type
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    is_layer_norm = family in ("nemotron", "starcoder2")
    has_bias = family == "starcoder2"
    made = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "layernorm_epsilon": epsilon(config),
        "layernorm_zero_centered_gamma": family in ("nemotron", "gemma", "gemma2", "gemma3_text"),
        "normalization": "LayerNorm" if is_layer_norm else "RMSNorm",
        "add_bias_linear": has_bias,
        "add_qkv_bias": family == "qwen2",
        "qk_layernorm": family in ("qwen3", "qwen3_moe", "gemma3_text", "exaone4", "olmo2"),
        "gated_linear_unit": not is_layer_norm,
        "activation_func": {"_target_": _FUNCTIONS[activation], "_call_": False},
        "bias_activation_fusion": has_bias,
        "window_size": [window(config), 0] if window(config) else None,
        "rotary_interleaved": False,
        "apply_residual_connection_post_layernorm": False,
        "apply_query_key_layer_scaling": False,
        "fp32_residual_connection": False,
        "init_method_std": config.initializer_range,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "softmax_scale": None,
    }
    if has_bias:  # F.gelu with its fusion is the tanh form
        made["activation_func"] = {"_target_": "torch._C._nn.gelu", "_call_": False}
    return {
        **made,
        **mixture_config(config),
        **core_latent.fields(config),
        **core_gpt_oss.fields(config),
        **core_llama4.fields(config),
    }


def nemo2(config: Any, name: str, **changes: Any) -> dict[str, Any]:
    """``context/model.yaml`` of a NeMo 2 directory, for a model of llama_models.MODELS."""
    family, rope = config.model_type, config.rope_parameters
    made = architecture(config)
    made |= {
        "_target_": f"{_BASE}.{_TARGETS.get(name, _TARGETS[family])}",
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        "seq_len_interpolation_factor": rope["factor"] if rope["rope_type"] == "linear" else None,
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "make_vocab_size_divisible_by": divisible_by(config),
        "seq_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "fp16_lm_cross_entropy": False,
        "parallel_output": True,
    }
    if rope["rope_type"] == "llama3":
        made |= {"scale_factor": rope["factor"], "low_freq_factor": rope["low_freq_factor"]}
        made |= {"high_freq_factor": rope["high_freq_factor"]}
        made |= {"old_context_len": rope["original_max_position_embeddings"]}
    if family == "gemma2":
        for field in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
            made[field] = getattr(config, field)
    tokenizer = {
        "_target_": "nemo.collections.common.tokenizers.huggingface.auto_tokenizer.AutoTokenizer",
        "pretrained_model_name": "nemo_tokenizer",
        "vocab_file": None,
        "merges_file": None,
    }
    module = "deepseek" if family.startswith("deepseek") else family.removesuffix("_moe")
    module = "phi3mini" if family == "phi3" else module
    target = f"{_BASE}.{module}.{_MODELS[family]}"
    return {"_target_": target, "config": {**made, **changes}, "tokenizer": tokenizer}


def bridge(config: Any, grid: tuple[int, int] = (1, 1)) -> dict[str, Any]:
    """The section ``model`` of Megatron-Bridge's ``run_config.yaml``."""
    rope, names = config.rope_parameters, ("gpt_provider.GPTModelProvider", "gpt_provider.default_layer_spec")
    target, spec = (f"megatron.bridge.models.{name}" for name in PROVIDERS.get(config.model_type, names))
    made = architecture(config) | {
        "_target_": target,
        "transformer_layer_spec": {"_target_": spec, "_call_": False},
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "seq_length": config.max_position_embeddings,
        "window_size": core_window(config),
        "tensor_model_parallel_size": grid[0],
        "pipeline_model_parallel_size": grid[1],
    }
    if config.model_type == "exaone_moe":
        sliding = [int(kind == "sliding_attention") for kind in config.layer_types]
        made |= {"window_attn_skip_freq": sliding, "no_rope_freq": [1 - each for each in sliding]}
        made |= {"layer_types": config.layer_types, "sliding_windows": [config.sliding_window * n for n in sliding]}
    return made


def megatron_lm(config: Any, grid: tuple[int, int] = (1, 1), **changes: Any) -> dict[str, Any]:
    """The saved arguments of Megatron-LM."""
    rope, made = config.rope_parameters, architecture(config)
    for name in ("activation_func", "gated_linear_unit", "layernorm_zero_centered_gamma", "bias_activation_fusion"):
        del made[name]
    family = config.model_type
    made |= {
        "swiglu": family not in ("nemotron", "starcoder2", "gemma", "gemma2", "gpt_oss"),
        "quick_geglu": family == "gpt_oss",
        "squared_relu": family == "nemotron",
        "openai_gelu": False,
        "bias_gelu_fusion": family == "starcoder2",
        "apply_layernorm_1p": family == "nemotron",
        "norm_epsilon": epsilon(config),
        "group_query_attention": config.num_key_value_heads != config.num_attention_heads,
        "position_embedding_type": "yarn" if family == "gpt_oss" else "rope",
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
        "rotary_base": int(rope["rope_theta"]),
        "rotary_seq_len_interpolation_factor": rope["factor"] if rope["rope_type"] == "linear" else None,
        "use_rope_scaling": rope["rope_type"] == "llama3",
        "rope_scaling_factor": rope.get("factor", 8.0),
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "make_vocab_size_divisible_by": divisible_by(config),
        "padded_vocab_size": padded_vocabulary(config, grid[0]),
        "tensor_model_parallel_size": grid[0],
        "pipeline_model_parallel_size": grid[1],
        "tokenizer_type": "Llama2Tokenizer",
        "tokenizer_model": "tokenizer.model",
        "transformer_impl": "transformer_engine",
        "num_experts": made.pop("num_moe_experts"),
        "window_size": core_window(config),
    }
    return {**made, **changes}
