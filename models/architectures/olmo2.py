"""OLMo 2: norms behind attention and feed-forward alone, and one over all heads of the queries and of the keys.

Keys and defaults: transformers, ``configuration_olmo2.py``.
"""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import WHOLE, Biases

OLMO2 = Architecture(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    keys=llama.keys(more=[Biases("attention_bias")]),
    has={"norms.is_before": False, "norms.is_after": True, "attention.qk_norm": WHOLE},
    names={"post_attention_norm": "post_attention_layernorm"},
    defaults={**llama.DEFAULTS, "rms_norm_eps": 1e-5},
)
