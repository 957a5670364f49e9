"""Phi-3, 3.5 and 4: query, key and value in one tensor, gate and up in another, and longrope of a part of a head.

Keys and defaults: transformers, ``configuration_phi3.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.architecture import Architecture
from models.architectures import llama
from models.blocks.attention import Biases, Heads
from models.blocks.rope_keys import ORIGINAL
from models.blocks.rope_scaling import LongRope
from models.blocks.rotary import DEFAULT, ROPE_KEYS, Rope
from models.blocks.windows import Windows
from models.config_json import ConfigJson
from models.keys import Fields

_OLDER = ("su", "yarn")
"""What older files call longrope."""


class PlainOrLong(Rope):
    """The rotation, whose original length stands beside the mapping, and counts there."""

    kinds = (DEFAULT, LongRope.kind)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        return super().read(_renamed(config))

    def write(self, fields: Fields) -> dict[str, Any]:
        scaling = fields[self.says[0]][0].scaling
        original = {ORIGINAL: scaling.original_max_position} if isinstance(scaling, LongRope) else {}
        return {**super().write(fields), **original}

    def problems(self, config: ConfigJson) -> list[str]:
        return super().problems(_renamed(config))

    def lacks(self, fields: Fields) -> list[str]:
        scaling = getattr(fields[self.says[0]][0], "scaling", None)
        others = [] if isinstance(scaling, LongRope | None) else [f"{self.says[0]}: {scaling.kind}  (it has longrope)"]
        return super().lacks(fields) + others


def _renamed(config: ConfigJson) -> ConfigJson:
    said = {key: config[key] for key in ROPE_KEYS if isinstance(config.get(key), Mapping)}
    kinds = {key: rope.get("rope_type", rope.get("type")) for key, rope in said.items()}
    longer = {key: {**said[key], "rope_type": LongRope.kind} for key, kind in kinds.items() if kind in _OLDER}
    return ConfigJson({**config, **longer})


PHI3 = Architecture(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    keys=llama.keys(
        heads=Heads(is_square_unsaid=True),
        rope=PlainOrLong(is_partial=True),
        more=[Windows(is_listed=False), Biases()],
    ),
    has={"attention.is_fused": True, "feed_forward.is_fused": True},
    defaults={
        **llama.DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
    },
    limits={"default_theta": ((None,), "rope_theta is read, for which this class takes it")},
)
