"""Numbers that a layer's inputs and outputs are multiplied by, where a model was scaled by them (muP).

Meaning: transformers, ``modeling_falcon_h1.py``. They change no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from models.config_json import CHECKS, ConfigJson
from models.errors import ModelError
from models.keys import Fields, Key, Keys


@dataclass(frozen=True)
class Multipliers:
    """What is multiplied by what.

    Attributes:
        key: keys, before they are rotated.
        attention_in, attention_out: attention's normalised input, and its output.
        mamba_in, mamba_out: the same of Mamba.
        sections: rows of Mamba's linear layer, a number for each of its sections.
        gate, down: the feed-forward's gate before its function, and its output.
    """

    logits: float = 1.0
    key: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0
    sections: tuple[float, ...] = (1.0,) * 5
    gate: float = 1.0
    down: float = 1.0


class Listed(Keys):
    """The lists: of Mamba's sections, and of the feed-forward. Null is a list of ones."""

    says: ClassVar[tuple[str, ...]] = ("multipliers.sections", "multipliers.gate", "multipliers.down")
    _SECTIONS, _FEED_FORWARD = "ssm_multipliers", "mlp_multipliers"

    def read(self, config: ConfigJson) -> dict[str, Any]:
        sections, halves = _numbers(config, self._SECTIONS, 5), _numbers(config, self._FEED_FORWARD, 2)
        return dict(zip(self.says, (sections, *halves), strict=True))

    def write(self, fields: Fields) -> dict[str, Any]:
        sections, *halves = (fields[name] for name in self.says)
        return {self._SECTIONS: list(sections), self._FEED_FORWARD: halves}


def _numbers(config: ConfigJson, key: str, count: int) -> tuple[float, ...]:
    if config.get(key) is None:
        return (1.0,) * count
    listed, where = CHECKS.entries(config[key], f"config.json: {key}"), f"config.json: {key}"
    if len(listed) != count:
        raise ModelError(f"{where} has {len(listed)} numbers, not {count}")
    return tuple(CHECKS.above_zero(each, where) for each in listed)


_WORDS = {
    **{"lm_head_multiplier": "logits", "key_multiplier": "key"},
    **{"attention_in_multiplier": "attention_in", "attention_out_multiplier": "attention_out"},
    **{"ssm_in_multiplier": "mamba_in", "ssm_out_multiplier": "mamba_out"},
}
KEYS: tuple[Keys, ...] = (
    *(Key(key, f"multipliers.{name}", ConfigJson.above_zero) for key, name in _WORDS.items()),
    Listed(),
)
"""Falcon-H1's words."""
DEFAULTS: dict[str, Any] = {**dict.fromkeys(_WORDS, 1.0), "ssm_multipliers": None, "mlp_multipliers": None}
