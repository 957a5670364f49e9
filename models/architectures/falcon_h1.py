"""Falcon-H1: in every layer Mamba 2 and attention work side by side on one normalised input; a feed-forward follows.

Keys and defaults: transformers, ``configuration_falcon_h1.py``. Numbers multiply what goes in and out everywhere.
"""

from __future__ import annotations

from math import inf
from typing import Any, ClassVar

from models.architecture import Architecture
from models.architectures import llama
from models.blocks import multipliers
from models.blocks.attention import Biases
from models.blocks.mamba import NAMES, OneEpsilon
from models.checks import shown
from models.config_json import ConfigJson
from models.errors import ModelError
from models.keys import Constants, Fields, Key, Keys, flag

BLOCKS = ("attention", "mamba", "feed_forward")


class Alike(Keys):
    """The blocks, which no key says: every layer has all."""

    says: ClassVar[tuple[str, ...]] = ("layers.blocks",)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return {self.says[0]: (BLOCKS,) * config.layer_num}

    def write(self, fields: Fields) -> dict[str, Any]:
        return {}

    def lacks(self, fields: Fields) -> list[str]:
        strange = sorted({"+".join(blocks) for blocks in fields[self.says[0]]} - {"+".join(BLOCKS)})
        return [f"{self.says[0]}: {', '.join(strange)}  (it is {'+'.join(BLOCKS)})"] if strange else []


class StateHeads(Keys):
    """How many heads Mamba has, and how wide they are: by themselves, or by the width of all."""

    says: ClassVar[tuple[str, ...]] = ("mamba.head_num", "mamba.size_per_head")
    _HEADS, _SIZE, _WIDTH, _TIMES = "mamba_n_heads", "mamba_d_head", "mamba_d_ssm", "mamba_expand"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        heads, is_whole = config.size(self._HEADS), config.get(self._WIDTH) is not None
        width = config.size(self._WIDTH) if is_whole else config.size(self._TIMES) * config.size("hidden_size")
        size = width // heads if config.get(self._SIZE) == "auto" else config.size(self._SIZE)
        if heads * size != width:
            raise ModelError(f"config.json: {self._HEADS} {heads} times {self._SIZE} {size} is not {width}")
        return dict(zip(self.says, (heads, size), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        heads, size = (fields[name] for name in self.says)
        return {self._HEADS: heads, self._SIZE: size, self._WIDTH: heads * size}


class StateBiases(Keys):
    """Biases of Mamba's linear layers: a key each, which say the same."""

    says: ClassVar[tuple[str, ...]] = ("mamba.has_bias",)
    _IN, _OUT = "mamba_proj_bias", "projectors_bias"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return {self.says[0]: flag(config, self._IN)}

    def write(self, fields: Fields) -> dict[str, Any]:
        return dict.fromkeys((self._IN, self._OUT), fields[self.says[0]])

    def problems(self, config: ConfigJson) -> list[str]:
        inward, outward = config.get(self._IN), config.get(self._OUT)
        if bool(inward) == bool(outward):
            return []
        return [f"{self._IN}: {shown(inward)}  ({self._OUT} is {shown(outward)}; both have biases, or none)"]


FALCON_H1 = Architecture(
    model_type="falcon_h1",
    class_name="FalconH1ForCausalLM",
    keys=llama.keys(
        function=Constants({"hidden_act": "silu"}),
        more=[
            Biases("attention_bias", "mlp_bias"),
            Alike(),
            StateHeads(),
            StateBiases(),
            Key("mamba_n_groups", "mamba.group_num"),
            Key("mamba_d_state", "mamba.state_size"),
            Key("mamba_d_conv", "mamba.conv_size"),
            Key("mamba_conv_bias", "mamba.has_conv_bias", flag, unset=False),
            Key("mamba_chunk_size", "mamba.chunk_size"),
            Key("mamba_rms_norm", "mamba.has_norm", flag, unset=False),
            Key("mamba_norm_before_gate", "mamba.has_norm_before_gate", flag, unset=False),
            OneEpsilon(),
            Key("embedding_multiplier", "embedding_scale", ConfigJson.above_zero),
            *multipliers.KEYS,
        ],
    ),
    names={
        "final_norm": "model.final_layernorm",
        "pre_mlp_norm": "pre_ff_layernorm",
        **{role: f"feed_forward.{role}_proj" for role in ("gate", "up", "down")},
        **{role: name.replace("mixer.", "mamba.") for role, name in NAMES.items()},
    },
    defaults={
        **{"vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 8192, "attention_bias": False, "mlp_bias": False, "projectors_bias": False},
        **{"mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1},
        **{"mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256},
        **{"mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_norm_before_gate": True},
        **{"mamba_rms_norm": False, "embedding_multiplier": 1.0, **multipliers.DEFAULTS},
    },
    limits={
        "layers_block_type": ((None,), "every layer is alike"),
        # The class bounds dt of a whole text, and not of a token that follows.
        "time_step_limit": (((0.0, inf), [0.0, inf], [0.0, {"__float__": "Infinity"}]), "dt has no bounds"),
    },
)
