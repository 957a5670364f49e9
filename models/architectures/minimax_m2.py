"""MiniMax M2: experts in every layer, norms over the whole projection. Keys: ``configuration_minimax_m2.py``."""

from __future__ import annotations

from typing import Any

from models.architecture import Architecture
from models.architectures import llama
from models.architectures.mixtral import NAMES
from models.blocks.attention import WHOLE, Biases
from models.blocks.mixture import SIGMOID, EveryLayer, Experts
from models.blocks.rotary import Rope
from models.config_json import ConfigJson
from models.keys import Constants, Fields


class RotaryDim(Rope):
    """The rotated part of a head, which files of before transformers 5 say by its width."""

    _WIDTH, _PART = "rotary_dim", "partial_rotary_factor"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return super().read(self._completed(config))

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self._WIDTH: fields[self.says[0]][0].width, **super().write(fields)}

    def _completed(self, config: ConfigJson) -> ConfigJson:
        if config.get(self._WIDTH) is None or config.get(self._PART) is not None:
            return config
        return ConfigJson({**config, self._PART: config.number(self._WIDTH) / config.head_size})


MINIMAX_M2 = Architecture(
    model_type="minimax_m2",
    class_name="MiniMaxM2ForCausalLM",
    keys=llama.keys(
        rope=RotaryDim(is_partial=True),
        more=[
            Biases(),
            EveryLayer(),
            Experts(width="intermediate_size"),
            Constants({"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True}),
        ],
    ),
    has={"attention.qk_norm": WHOLE, "mixture.scoring": SIGMOID, "mixture.has_choice_bias": True},
    names={**NAMES, "choice_bias": "block_sparse_moe.e_score_correction_bias"},
    defaults={
        **llama.DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "rope_theta": 5e6,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    },
    aliases={"num_experts": "num_local_experts"},
)
