"""Mistral: Llama with a window. Keys and defaults: transformers, ``configuration_mistral.py``."""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases
from models.blocks.windows import Windows

MISTRAL = Architecture(
    model_type="mistral",
    class_name="MistralForCausalLM",
    keys=llama.keys(more=[Windows(), Biases()]),  # with layer_types transformers takes its Ministral, whose they are
    defaults={
        **llama.DEFAULTS,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
)
