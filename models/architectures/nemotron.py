"""Nemotron 3 and 4: layer norms stored less one, a feed-forward without a gate, heads that are rotated in part.

Keys and defaults: transformers, ``configuration_nemotron.py``.
"""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases
from models.blocks.norms import LAYER_NORM
from models.blocks.rotary import Rope

NEMOTRON = Architecture(
    model_type="nemotron",
    class_name="NemotronForCausalLM",
    keys=llama.keys(eps="norm_eps", rope=Rope(is_partial=True), more=[Biases("attention_bias", "mlp_bias")]),
    has={"norms.kind": LAYER_NORM, "norms.is_zero_centred": True, "feed_forward.is_gated": False},
    defaults={
        **llama.DEFAULTS,
        "hidden_act": "relu2",
        "partial_rotary_factor": 0.5,
        "norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    },
)
