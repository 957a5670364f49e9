"""Tiny models of the Llama family by transformers, with weights made by integer arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.tiny_models.huggingface_models import IDS, VOCAB, filling, write_tokenizer

LAYERS, LENGTH = 4, 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    **IDS,
}
_WIDE = {"head_dim": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 8}),
    "llama 2 70B": ("Llama", {}),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama 3.2": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "codellama": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0}}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "mistral nemo": ("Mistral", {"sliding_window": None, **_WIDE}),
    "nemotron": ("Nemotron", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2 windowed": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}),
    "qwen3": ("Qwen3", {**_WIDE, "tie_word_embeddings": True}),
    "gemma": ("Gemma", _WIDE),
    "gemma2": ("Gemma2", {**_WIDE, "sliding_window": 5, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}),
}
"""Name: prefix of transformers' classes, and what is not as in ``_SIZES``."""
MIXTRAL = ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2})


def build_llama(prefix: str, **changes: Any) -> Any:
    """Build a model in fp32 with every weight filled."""
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**{**_SIZES, **changes})
    config._attn_implementation = "eager"  # Gemma 2's soft cap of scores needs it
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(filling(name, tuple(parameter.shape))))
    return model


def save_llama(name: str, path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Save a model of ``MODELS`` as the hub has it, with a byte-level tokenizer, and return it in fp32."""
    prefix, own = MODELS[name]
    model = build_llama(prefix, **{**own, **changes})
    model.to(dtype).save_pretrained(path)
    write_tokenizer(path)
    return model.float()
