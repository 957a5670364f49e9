"""Qwen3: queries and keys are normalised head by head. Keys: transformers, ``configuration_qwen3.py``."""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import llama, qwen2
from models.blocks.attention import BY_HEAD, Biases
from models.blocks.windows import Windows

QWEN3 = Architecture(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    keys=llama.keys(more=[Windows(is_switched=True), Biases("attention_bias")]),
    has={"attention.qk_norm": BY_HEAD},
    defaults={**qwen2.DEFAULTS, "head_dim": 128},
)
