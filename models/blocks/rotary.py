"""Positions by rotation of queries and keys, and what ``config.json`` says of it by transformers 5's precedence.

Rules: transformers, ``modeling_rope_utils.py``: ``convert_rope_params_to_dict``, ``standardize_rope_params``. Version 4
wrote ``rope_scaling`` and ``rope_theta``, version 5 writes ``rope_parameters``; whoever changes a file may leave both.
Version 4's keys are written: every version reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, nextafter
from typing import Any

from models.checks import shown
from models.config_json import CHECKS, LARGEST, ConfigJson
from models.errors import ModelError
from models.keys import Fields, Keys

DEFAULT, LINEAR, LLAMA3 = "default", "linear", "llama3"
"""Angles as they are, positions divided by a factor, and the frequencies of Llama 3.1."""
ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""The first that holds something counts, and of the other nothing."""
_ORIGINAL, _PART = "original_max_position_embeddings", "partial_rotary_factor"
_REASON = "positions as they are, divided by one factor (linear) and Llama 3.1's (llama3) are read"


@dataclass(frozen=True)
class Scaling:
    """How angles are scaled.

    Attributes:
        kind: LINEAR or LLAMA3.
        factor: what positions are divided by (linear), or those of long waves (llama3).
        low_freq_factor, high_freq_factor: of llama3: waves that fit into original_max_position less often than the
            first are divided, those that fit more often than the second are not, and the others are in between.
        original_max_position: of llama3: of the model before its context was extended.
    """

    kind: str
    factor: float
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position: int = 0


@dataclass(frozen=True)
class Rotary:
    """The rotation of one layer: the halves of a head's first elements against each other.

    Attributes:
        width: how many elements of a head are rotated.
        base: of the waves' lengths.
        scaling: of the angles; None: they are as they are.
    """

    width: int
    base: float = 10000.0
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Rope(Keys):
    """The rotation, alike in all layers.

    Attributes:
        is_partial: whether partial_rotary_factor is honoured; else whole heads are rotated.
    """

    is_partial: bool = False
    says = ("layers.rotary",)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        rope = rope_parameters(config)
        width = int(config.head_size * rotated_part(rope))
        if width < 2 or width % 2:
            raise ModelError(f"config.json: {width} of a head's {config.head_size} elements are rotated, not pairs")
        base = CHECKS.above_zero(rope["rope_theta"], "config.json: rope_theta")
        return {self.says[0]: (Rotary(width, base, read_scaling(rope, config, rope_key(config))),) * config.layer_num}

    def write(self, fields: Fields) -> dict[str, Any]:
        rotary, size = fields[self.says[0]][0], fields["attention.size_per_head"]
        part = {_PART: _factor(rotary.width, size)} if self.is_partial else {}
        return {"rope_theta": rotary.base, "rope_scaling": written(rotary.scaling), **part}

    def problems(self, config: ConfigJson) -> list[str]:
        rope = rope_parameters(config)
        found = rope_problems(rope, rope_key(config))
        part = rotated_part(rope)
        if not self.is_partial and part != 1:
            found.append(f"{_PART}: {part:g}  (whole heads are rotated)")
        return found

    def lacks(self, fields: Fields) -> list[str]:
        rotaries, size = set(fields[self.says[0]]), fields["attention.size_per_head"]
        if len(rotaries) > 1:
            return [f"{self.says[0]}: {len(rotaries)} kinds  (all layers rotate alike)"]
        width = rotaries.pop().width
        if self.is_partial or width == size:
            return []
        return [f"{self.says[0]}: {width} of {size} elements  (whole heads are rotated)"]


def rope_key(config: Mapping[str, Any]) -> str:
    """Name the key that counts."""
    return next((key for key in ROPE_KEYS if config.get(key)), ROPE_KEYS[-1])


def rope_parameters(config: Mapping[str, Any], base_key: str = "rope_theta", part_key: str = _PART) -> dict[str, Any]:
    """Complete what the key that counts says, as transformers does: with its type, its base and the rotated part.

    Args:
        config: with the architecture's defaults.
        base_key: of the base beside the mapping; what the mapping itself says goes before.
        part_key: of the rotated part, likewise.

    Raises:
        ModelError: the value is no mapping.
    """
    said = config.get(rope_key(config)) or {}
    if not isinstance(said, Mapping):
        raise ModelError(f"config.json: {rope_key(config)} is {shown(said)}, not a mapping")
    rope = {"rope_theta": config.get(base_key, 10000.0), "rope_type": said.get("type", DEFAULT), **said}
    if config.get(part_key) is not None:
        rope.setdefault(_PART, config[part_key])
    if _ORIGINAL in config and rope["rope_type"] == LLAMA3:
        rope[_ORIGINAL] = config[_ORIGINAL]
    return rope


def rope_problems(rope: Mapping[str, Any], key: str) -> list[str]:
    """List what cannot be described of a rotation, one line each."""
    kind = rope["rope_type"]
    if kind in (DEFAULT, LINEAR, LLAMA3) and not any(isinstance(value, dict) for value in rope.values()):
        return []
    return [f"{key}: {shown(kind if kind != DEFAULT else dict(rope))}  ({_REASON})"]


def written(scaling: Scaling | None) -> dict[str, Any] | None:
    """Write ``rope_scaling``."""
    if scaling is None:
        return None
    said: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == LINEAR:
        return {**said, "type": LINEAR}
    waves = {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return {**said, **waves, _ORIGINAL: scaling.original_max_position}


def read_scaling(rope: Mapping[str, Any], config: ConfigJson, key: str) -> Scaling | None:
    """Read how the angles of a rotation are scaled; ``key`` is where it stands."""
    where, kind = f"config.json: {key}", rope["rope_type"]
    if kind == DEFAULT:
        return None
    factor = CHECKS.above_zero(rope.get("factor"), f"{where}: factor")
    if kind == LINEAR:
        return Scaling(LINEAR, factor)
    low, high = (
        CHECKS.above_zero(rope.get(f"{end}_freq_factor"), f"{where}: {end}_freq_factor") for end in ("low", "high")
    )
    length = rope.get(_ORIGINAL, config.get("max_position_embeddings"))
    return Scaling(LLAMA3, factor, low, high, CHECKS.bounded(length, f"{where}: {_ORIGINAL}", LARGEST))


def rotated_part(rope: Mapping[str, Any]) -> float:
    """Read how much of a head is rotated."""
    return CHECKS.number(rope.get(_PART, 1.0), f"config.json: {_PART}")


def _factor(width: int, size: int) -> float:
    """Divide, so that transformers, which cuts what it multiplies off, comes to the same width."""
    factor = width / size
    return factor if int(size * factor) == width else nextafter(factor, inf)
