"""SmolLM3: Llama with layers that do not rotate, which may have a window.

Keys and defaults: transformers, ``configuration_smollm3.py``.
"""

from __future__ import annotations

from typing import Any

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases
from models.blocks.rotary import Rope, Rotary
from models.blocks.windows import Windows
from models.config_json import CHECKS, ConfigJson
from models.errors import ModelError
from models.keys import Fields

_ROTATES, _PERIOD = "no_rope_layers", "no_rope_layer_interval"


class RopeInSome(Rope):
    """The rotation of the layers that ``no_rope_layers`` has a 1 for; without it the last of each period has none."""

    def read(self, config: ConfigJson) -> dict[str, Any]:
        rotaries = super().read(config)[self.says[0]]
        pairs = zip(rotaries, rotates(config), strict=True)
        return {self.says[0]: tuple(rotary if does else None for rotary, does in pairs)}

    def write(self, fields: Fields) -> dict[str, Any]:
        rotaries = fields[self.says[0]]
        one = next(filter(None, rotaries), Rotary(fields["attention.size_per_head"]))
        return {**super().write({**fields, self.says[0]: (one,)}), _ROTATES: [int(bool(each)) for each in rotaries]}

    def lacks(self, fields: Fields) -> list[str]:
        rotating = tuple(filter(None, fields[self.says[0]]))
        return super().lacks({**fields, self.says[0]: rotating}) if rotating else []


class WindowsUnrotated(Windows):
    """The window of each layer; where none are listed, the layers that do not rotate have it."""

    def unlisted(self, config: ConfigJson) -> list[bool]:
        return [not does for does in rotates(config)]

    def write(self, fields: Fields) -> dict[str, Any]:
        return {key: value for key, value in super().write(fields).items() if key != "max_window_layers"}


def rotates(config: ConfigJson) -> list[bool]:
    """Return which layers rotate; an empty list says nothing."""
    if not config.get(_ROTATES):
        period = config.size(_PERIOD)
        return [bool((layer + 1) % period) for layer in range(config.layer_num)]
    listed = CHECKS.entries(config[_ROTATES], f"config.json: {_ROTATES}")
    if len(listed) < config.layer_num:
        raise ModelError(f"config.json: {_ROTATES} names {len(listed)} layers of {config.layer_num}")
    return [bool(each) for each in listed[: config.layer_num]]


SMOLLM3 = Architecture(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    keys=llama.keys(
        rope=RopeInSome(),
        more=[WindowsUnrotated(is_switched=True), Biases("attention_bias", "mlp_bias")],
    ),
    defaults={
        **llama.DEFAULTS,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    },
)
