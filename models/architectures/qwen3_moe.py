"""Qwen3's mixtures: experts in every layer that is not said to have none. Keys: ``configuration_qwen3_moe.py``."""

from __future__ import annotations

from typing import Any

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import BY_HEAD, Biases
from models.blocks.mixture import Experts, SparseSteps
from models.blocks.windows import Windows
from models.config_json import ConfigJson
from models.keys import Fields, Key, flag


class SwitchedWindow(Windows):
    """A window in every layer, or in none: ``use_sliding_window`` says which."""

    def unlisted(self, config: ConfigJson) -> list[bool]:
        return [True] * config.layer_num

    def write(self, fields: Fields) -> dict[str, Any]:
        window = max(fields[self.says[0]])
        return {"use_sliding_window": bool(window), "sliding_window": window or None}

    def lacks(self, fields: Fields) -> list[str]:
        return Windows(is_listed=False).lacks(fields)


QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    keys=llama.keys(
        more=[
            SwitchedWindow(is_listed=False, is_switched=True),
            Biases("attention_bias"),
            SparseSteps(),
            Experts(count="num_experts"),
            Key("norm_topk_prob", "mixture.is_normalised", flag, unset=False),
        ]
    ),
    has={"attention.qk_norm": BY_HEAD},
    defaults={
        **llama.DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    aliases={"num_local_experts": "num_experts"},
)
