"""StarCoder2: layer norms, biases everywhere, no gate. Keys: transformers, ``configuration_starcoder2.py``."""

from __future__ import annotations

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases, Heads
from models.blocks.norms import LAYER_NORM
from models.blocks.windows import Windows

STARCODER2 = Architecture(
    model_type="starcoder2",
    class_name="Starcoder2ForCausalLM",
    keys=llama.keys(
        heads=Heads(is_square_unsaid=True),
        eps="norm_epsilon",
        more=[Windows(is_listed=False), Biases("use_bias", "use_bias")],
    ),
    has={"norms.kind": LAYER_NORM, "feed_forward.is_gated": False},
    names={"up": "mlp.c_fc", "down": "mlp.c_proj"},
    defaults={
        **llama.DEFAULTS,
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
)
