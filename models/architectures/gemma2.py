"""Gemma 2: Gemma with norms behind attention and feed-forward, caps, and a window in every other layer.

Keys and defaults: transformers, ``configuration_gemma2.py``.
"""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import gemma, llama
from models.blocks.attention import Biases, Caps
from models.blocks.feed_forward import Function
from models.blocks.windows import Windows

NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
GEMMA2 = Architecture(
    model_type="gemma2",
    class_name="Gemma2ForCausalLM",
    keys=llama.keys(
        function=Function("hidden_activation", also=("hidden_act",), exact="gelu_python"),
        more=[Windows(pattern="10"), Biases("attention_bias"), Caps(), gemma.RootScale()],
    ),
    has={"norms.is_zero_centred": True, "norms.is_after": True},
    names=NAMES,
    defaults={
        **gemma.DEFAULTS,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
