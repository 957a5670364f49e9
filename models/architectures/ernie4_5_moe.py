"""Ernie 4.5 with experts: neighbours are rotated, a softmax with a bias for choosing.

Keys: transformers, ``configuration_ernie4_5_moe.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases
from models.blocks.mixture import EveryLayer, Experts, SharedExperts
from models.config_json import ConfigJson
from models.keys import Fields


class FromTo(EveryLayer):
    """Experts in every n-th layer from the n-th on, between a first and a last one."""

    _FIRST, _LAST, _STEP = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"

    def sparse(self, config: ConfigJson) -> Sequence[bool]:
        first, step, count = config.whole(self._FIRST), config.size(self._STEP), config.layer_num
        last = count - 1 if config.get(self._LAST) == -1 else config.whole(self._LAST)
        return [first <= layer <= last and not (layer + 1) % step for layer in range(count)]

    def write(self, fields: Fields) -> dict[str, Any]:
        blocks = fields[self.says[0]]
        sparse = [layer for layer, each in enumerate(blocks) if "mixture" in each] or [len(blocks)]
        step = sparse[1] - sparse[0] if len(sparse) > 1 else 1
        return {self._FIRST: sparse[0], self._LAST: sparse[-1], self._STEP: step}


ERNIE4_5_MOE = Architecture(
    model_type="ernie4_5_moe",
    class_name="Ernie4_5_MoeForCausalLM",
    keys=llama.keys(
        more=[
            Biases(),
            FromTo(),
            Experts(count="moe_num_experts", used="moe_k"),
            SharedExperts("moe_num_shared_experts", may_be_none=True),
        ]
    ),
    has={
        "attention.rotates_neighbours": True,
        "mixture.has_choice_bias": True,
        "mixture.is_choice_bias_row": True,
    },
    names={"choice_bias": "mlp.moe_statics.e_score_correction_bias"},
    defaults={
        **llama.DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    },
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    passes_over=("mtp_*",),
    limits={
        "use_bias": ((False, None), "linear layers have no biases"),
        "moe_norm_min": ((1e-12, None), "scores are divided by their sum"),
    },
)
