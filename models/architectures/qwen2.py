"""Qwen2 and 2.5: biases of queries, keys and values, and windows. Keys: transformers, ``configuration_qwen2.py``."""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases
from models.blocks.windows import Windows

DEFAULTS = {
    **llama.DEFAULTS,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN2 = Architecture(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    keys=llama.keys(more=[Windows(is_switched=True), Biases(has_qkv=True)]),
    defaults=DEFAULTS,
)
