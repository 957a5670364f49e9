"""Mixtral: Mistral with experts. Keys and defaults: transformers, ``configuration_mixtral.py``."""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases
from models.blocks.mixture import EveryLayer, Experts
from models.blocks.windows import Windows

_EXPERT = "block_sparse_moe.experts.{expert}"
NAMES = {
    "router": "block_sparse_moe.gate",
    "expert.gate": f"{_EXPERT}.w1",
    "expert.up": f"{_EXPERT}.w3",
    "expert.down": f"{_EXPERT}.w2",
}
MIXTRAL = Architecture(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    keys=llama.keys(more=[Windows(is_listed=False), Biases(), EveryLayer(), Experts(width="intermediate_size")]),
    names=NAMES,
    defaults={
        **llama.DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    aliases={"num_experts": "num_local_experts"},
)
