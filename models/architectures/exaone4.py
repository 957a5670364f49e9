"""EXAONE 4: norms behind attention and feed-forward alone, and of each head of queries and keys.

Where some layers have a window, those without do not rotate. Keys and defaults: transformers,
``configuration_exaone4.py``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import BY_HEAD, Biases
from models.blocks.rotary import Rope, Rotary
from models.blocks.windows import FULL, SLIDING, Windows
from models.config_json import ConfigJson
from models.errors import ModelError
from models.keys import Fields

_ROPE = Rope()
_WINDOW, _PERIOD, _UNUSED = "sliding_window", "sliding_window_pattern", 4096


class RopeInWindows(Windows):
    """The window of each layer; where ``sliding_window`` is set, the others do not rotate."""

    says: ClassVar[tuple[str, ...]] = ("layers.window", "layers.rotary")

    def read(self, config: ConfigJson) -> dict[str, Any]:
        windows, rotaries = super().read(config)["layers.window"], _ROPE.read(config)["layers.rotary"]
        if config.get(_WINDOW) is not None:
            rotaries = tuple(rotary if window else None for rotary, window in zip(rotaries, windows, strict=True))
        return {"layers.window": windows, "layers.rotary": rotaries}

    def unlisted(self, config: ConfigJson) -> list[bool]:
        """Return which layers have a window: the last of each period has none."""
        if config.get(_WINDOW) is None:
            raise ModelError(f"config.json: {_WINDOW} is not set, and layer_types does not say that no layer has one")
        period = config.size(_PERIOD)
        return [bool((layer + 1) % period) for layer in range(config.layer_num)]

    def write(self, fields: Fields) -> dict[str, Any]:
        windows, rotating = fields["layers.window"], _rotating(fields)
        rotary = rotating[0] if rotating else Rotary(fields["attention.size_per_head"])
        window = max(windows) or (None if rotating else _UNUSED)
        kinds = [SLIDING if each else FULL for each in windows]
        return {**_ROPE.write({**fields, "layers.rotary": (rotary,)}), _WINDOW: window, "layer_types": kinds}

    def problems(self, config: ConfigJson) -> list[str]:
        return _ROPE.problems(config)

    def lacks(self, fields: Fields) -> list[str]:
        found, windows, rotating = super().lacks(fields), fields["layers.window"], _rotating(fields)
        if rotating:
            found += _ROPE.lacks({**fields, "layers.rotary": rotating})
        rotates = [bool(each) for each in fields["layers.rotary"]]
        if rotates != [bool(each) for each in windows] and (max(windows) or not all(rotates)):
            found.append("layers.rotary: not in those layers that have a window  (it rotates in them alone)")
        return found

    def _lists(self) -> bool:
        return True


def _rotating(fields: Fields) -> tuple[Rotary, ...]:
    return tuple(filter(None, fields["layers.rotary"]))


EXAONE4 = Architecture(
    model_type="exaone4",
    class_name="Exaone4ForCausalLM",
    keys=llama.keys(rope=RopeInWindows(), more=[Biases()]),
    has={"norms.is_before": False, "norms.is_after": True, "attention.qk_norm": BY_HEAD},
    names={"post_attention_norm": "post_attention_layernorm"},
    defaults={
        **llama.DEFAULTS,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
)
