"""Granite 3: Llama whose embeddings, scores, blocks and logits are multiplied by numbers.

Keys and defaults: transformers, ``configuration_granite.py``.
"""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases, Multiplier
from models.config_json import ConfigJson
from models.keys import Key

_NUMBER = ConfigJson.above_zero
GRANITE = Architecture(
    model_type="granite",
    class_name="GraniteForCausalLM",
    keys=llama.keys(
        more=[
            Biases("attention_bias", "mlp_bias"),
            Multiplier("attention_multiplier"),
            Key("embedding_multiplier", "embedding_scale", _NUMBER),
            Key("residual_multiplier", "residual_multiplier", _NUMBER),
            Key("logits_scaling", "logits_divisor", _NUMBER),
        ]
    ),
    defaults={
        **llama.DEFAULTS,
        **dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    },
)
