"""Gemma: scaled embeddings, norms stored less one. Keys and defaults: transformers, ``configuration_gemma.py``."""

from __future__ import annotations

from typing import Any

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases
from models.blocks.feed_forward import Function
from models.config_json import ConfigJson
from models.keys import Fields, Keys

_TANH = "gelu_pytorch_tanh"
DEFAULTS = {**llama.DEFAULTS, "head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}


class RootScale(Keys):
    """Embeddings are multiplied by the root of the width, which no key says."""

    says = ("embedding_scale",)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return {self.says[0]: config.size("hidden_size") ** 0.5}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {}

    def lacks(self, fields: Fields) -> list[str]:
        scale = fields[self.says[0]]
        return [] if scale == fields["hidden_units"] ** 0.5 else [f"{self.says[0]}: {scale}  (the root of the width)"]


GEMMA = Architecture(
    model_type="gemma",
    class_name="GemmaForCausalLM",
    keys=llama.keys(
        # Google's files say gelu, and mean the tanh form; hidden_activation is what transformers 4 reads.
        function=Function(also=("hidden_activation",), other={"gelu": _TANH}, exact="gelu_python"),
        more=[Biases("attention_bias"), RootScale()],
    ),
    has={"norms.is_zero_centred": True},
    defaults={**DEFAULTS, "num_key_value_heads": 16, "hidden_act": _TANH},
)
