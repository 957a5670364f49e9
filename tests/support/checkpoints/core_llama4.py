"""A Llama 4 of transformers in megatron-core's words and names.

Fields and names: NeMo 2.4, ``gpt/model/llama.py`` (``Llama4Config``, the importer); the halves of an expert's rows:
transformers, ``Llama4TextExperts.forward``.
"""

from __future__ import annotations

from typing import Any

import torch

State = dict[str, torch.Tensor]
_PLACES = {"router.": "gate.", "shared_expert.": "shared_experts."}


def renamed(own: State) -> State:
    """Call a layer's tensors as other mixtures do, each expert's by itself; others than Llama 4's stay."""
    made = {key: value for key, value in own.items() if not key.startswith("feed_forward.")}
    for key, value in own.items():
        name = key.removeprefix("feed_forward.")
        if name == key:
            continue
        for theirs, ours in _PLACES.items():
            name = name.replace(theirs, ours)
        if not name.startswith("experts."):
            made[f"mlp.{name}"] = value
        for number, each in enumerate(value if name.startswith("experts.") else ()):
            parts = {"gate_proj": each.T.chunk(2)[0], "up_proj": each.T.chunk(2)[1]}
            parts = parts if name.endswith("gate_up_proj") else {"down_proj": each.T}
            made |= {f"mlp.experts.{number}.{part}.weight": one.contiguous() for part, one in parts.items()}
    return made


def fields(config: Any) -> dict[str, Any]:
    """Fields of TransformerConfig, and of the class that adds Llama 4's own, that a Llama has other values of."""
    if config.model_type != "llama4_text":
        return {}
    has_chunks = "chunked_attention" in config.layer_types
    own = {"nope_layer_interval": 4, "attention_chunk_size": config.attention_chunk_size} if has_chunks else {}
    return {
        **(own or {"no_rope_freq": [1 - each for each in config.no_rope_layers]}),
        "ffn_hidden_size": config.intermediate_size_mlp,
        "qk_layernorm": False,
        "qk_l2_norm": config.use_qk_norm,
        "rotary_interleaved": True,
        "moe_layer_freq": [int(layer in config.moe_layers) for layer in range(config.num_hidden_layers)],
        "moe_router_score_function": "sigmoid",
        "moe_router_dtype": None,
        "moe_apply_probs_on_input": True,
        "moe_shared_expert_intermediate_size": config.intermediate_size,
    }
