"""GLM 4.5 to 4.7: experts behind some dense layers, chosen in groups. Keys: ``configuration_glm4_moe.py``."""

from __future__ import annotations

from typing import Any, ClassVar

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import BY_HEAD, NO_NORM, Biases
from models.blocks.mixture import SIGMOID, Experts, FirstDense, Groups, SharedExperts
from models.blocks.rotary import Rope
from models.config_json import ConfigJson
from models.keys import Fields, Key, Keys, flag


class InputBiases(Biases):
    """Biases of the queries, keys and values alone."""

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return {**super().read(config), self.says[1]: False}


class QkNorm(Keys):
    """Whether queries and keys are normalised, each head by itself."""

    says: ClassVar[tuple[str, ...]] = ("attention.qk_norm",)
    _KEY = "use_qk_norm"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return {self.says[0]: BY_HEAD if config.get(self._KEY) else NO_NORM}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {self._KEY: bool(fields[self.says[0]])}

    def lacks(self, fields: Fields) -> list[str]:
        norm = fields[self.says[0]]
        return [] if norm in (BY_HEAD, NO_NORM) else [f"{self.says[0]}: {norm}  (it has {BY_HEAD}, or none)"]


GLM4_MOE = Architecture(
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    keys=llama.keys(
        rope=Rope(is_partial=True),
        more=[
            InputBiases("attention_bias"),
            QkNorm(),
            FirstDense(),
            Experts(count="n_routed_experts"),
            SharedExperts(),
            Groups(),
            Key("norm_topk_prob", "mixture.is_normalised", flag, unset=False),
            Key("routed_scaling_factor", "mixture.scale", ConfigJson.number),
            Key("num_nextn_predict_layers", "predictor_num", ConfigJson.whole),
        ],
    ),
    has={"mixture.scoring": SIGMOID, "mixture.has_choice_bias": True},
    defaults={
        **llama.DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "num_nextn_predict_layers": 1,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
