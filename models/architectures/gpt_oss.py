"""GPT-OSS: experts in every layer with a clamped gate, sinks, and windows in every other layer from the first on.

Keys and defaults: transformers, ``configuration_gpt_oss.py``; where nothing is said of the rotation, it is YaRN's.
"""

from __future__ import annotations

from typing import Any

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases
from models.blocks.mixture import EveryLayer, Experts
from models.blocks.rope_keys import ORIGINAL
from models.blocks.rotary import DEFAULT, ROPE_KEYS, Rope
from models.blocks.windows import Windows
from models.config_json import ConfigJson
from models.keys import Constants, Fields, Key

_SCALING, _PARAMETERS = ROPE_KEYS
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, ORIGINAL: 4096}


class YarnUnlessSaid(Rope):
    """The rotation; one that is not scaled is said."""

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return super().read(_with_yarn(config))

    def write(self, fields: Fields) -> dict[str, Any]:
        said = super().write(fields)
        return {**said, _SCALING: said[_SCALING] or {"rope_type": DEFAULT}}

    def problems(self, config: ConfigJson) -> list[str]:
        return super().problems(_with_yarn(config))


class Clamp(Key):
    """A number that the gate and what is multiplied with it do not exceed: there is always one."""

    def lacks(self, fields: Fields) -> list[str]:
        return [] if fields[self.field] else [f"{self.field}: 0  (it has one)"]


def _with_yarn(config: ConfigJson) -> ConfigJson:
    is_said = config.get(_SCALING) or config.get(_PARAMETERS) is not None
    return config if is_said else ConfigJson({**config, _PARAMETERS: _YARN})


GPT_OSS = Architecture(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    keys=llama.keys(
        function=Constants({"hidden_act": "silu"}),
        rope=YarnUnlessSaid(),
        more=[
            Windows(pattern="10"),
            Biases("attention_bias", has_mlp=True),
            EveryLayer(),
            Experts(width="intermediate_size"),
            Key("swiglu_alpha", "feed_forward.gate_factor", ConfigJson.above_zero),
            Clamp("swiglu_limit", "feed_forward.clamp", ConfigJson.above_zero),
        ],
    ),
    has={
        "attention.has_sinks": True,
        "feed_forward.up_offset": 1.0,
        "mixture.has_bias": True,
        "mixture.has_router_bias": True,
        "mixture.is_in_arrays": True,
    },
    names={"router": "mlp.router"},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    aliases={"num_experts": "num_local_experts"},
)
