"""Positions by rotation of queries and keys, and what ``config.json`` says of it by transformers 5's precedence.

Rules: transformers, ``modeling_rope_utils.py``: ``convert_rope_params_to_dict``, ``standardize_rope_params``. Version 4
wrote ``rope_scaling`` and ``rope_theta``, version 5 writes ``rope_parameters``; whoever changes a file may leave both.
Version 4's keys are written: every version reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, nextafter
from typing import Any, ClassVar

from models.blocks.rope_keys import ORIGINAL, Said
from models.blocks.rope_scaling import SCALINGS, Scaling
from models.checks import shown
from models.config_json import CHECKS, ConfigJson
from models.errors import ModelError
from models.keys import Fields, Keys

DEFAULT = "default"
"""Angles as they are."""
ROPE_KEYS = ("rope_scaling", "rope_parameters")
"""The first that holds something counts, and of the other nothing."""
_PART = "partial_rotary_factor"
KINDS = (DEFAULT, *SCALINGS)
"""Those that are read, by transformers' ``rope_type``."""
_OF_TWO_LENGTHS = ("llama3", "yarn", "longrope")
"""Scalings whose original length a key beside the mapping overrules."""


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

    def frequencies(self) -> list[float]:
        """List the angles from one position to the next, of each pair of elements."""
        plain = [self.base ** (-place / self.width) for place in range(0, self.width, 2)]
        return self.scaling.frequencies(plain, self.base) if self.scaling else plain

    def attention_factor(self, longest: int) -> float:
        """Return what sines and cosines are multiplied by; ``longest`` is the longest text of the model."""
        return self.scaling.attention_factor(longest) if self.scaling else 1.0


@dataclass(frozen=True)
class Rope(Keys):
    """The rotation, alike in all layers.

    Attributes:
        is_partial: whether partial_rotary_factor is honoured; else whole heads are rotated.
    """

    is_partial: bool = False
    kinds: ClassVar[Sequence[str]] = KINDS
    says = ("layers.rotary",)

    def read(self, config: ConfigJson) -> dict[str, Any]:
        rope = rope_parameters(config)
        width = int(config.head_size * rotated_part(rope))
        if width < 2 or width % 2:
            raise ModelError(f"config.json: {width} of a head's {config.head_size} elements are rotated, not pairs")
        return {self.says[0]: (read_rotary(rope, config, width, rope_key(config)),) * config.layer_num}

    def write(self, fields: Fields) -> dict[str, Any]:
        rotary, size = fields[self.says[0]][0], fields["attention.size_per_head"]
        part = {_PART: _factor(rotary.width, size)} if self.is_partial else {}
        return {"rope_theta": rotary.base, "rope_scaling": written(rotary.scaling), **part}

    def problems(self, config: ConfigJson) -> list[str]:
        rope = rope_parameters(config)
        found = rope_problems(rope, rope_key(config), self.kinds)
        part = rotated_part(rope)
        if not self.is_partial and part != 1:
            found.append(f"{_PART}: {part:g}  (whole heads are rotated)")
        return found

    def lacks(self, fields: Fields) -> list[str]:
        rotaries, size = set(fields[self.says[0]]), fields["attention.size_per_head"]
        if len(rotaries) > 1 or None in rotaries:
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
    if ORIGINAL in config and rope["rope_type"] in _OF_TWO_LENGTHS:
        rope[ORIGINAL] = config[ORIGINAL]
    return rope


def rope_problems(rope: Mapping[str, Any], key: str, kinds: Sequence[str] = KINDS) -> list[str]:
    """List what cannot be described of a rotation, or is of another kind, one line each."""
    kind = rope["rope_type"]
    if kind in kinds and not any(isinstance(value, dict) for value in rope.values()):
        return []
    return [f"{key}: {shown(kind if kind != DEFAULT else dict(rope))}  ({', '.join(kinds)} are read)"]


def written(scaling: Scaling | None) -> dict[str, Any] | None:
    """Write ``rope_scaling``."""
    return {"rope_type": scaling.kind, **scaling.write()} if scaling else None


def read_rotary(rope: Mapping[str, Any], config: ConfigJson, width: int, key: str) -> Rotary:
    """Read a rotation of ``width`` elements; ``key`` is where it stands."""
    where, kind = f"config.json: {key}", rope["rope_type"]
    base = CHECKS.above_zero(rope["rope_theta"], "config.json: rope_theta")
    if kind == DEFAULT:
        return Rotary(width, base)
    scaling = SCALINGS[kind].read(Said(rope, where, config.get("max_position_embeddings")))
    if problem := scaling.problem(width, base):
        raise ModelError(f"{where}: {kind}: {problem}")
    return Rotary(width, base, scaling)


def rotated_part(rope: Mapping[str, Any]) -> float:
    """Read how much of a head is rotated."""
    return CHECKS.number(rope.get(_PART, 1.0), f"config.json: {_PART}")


def _factor(width: int, size: int) -> float:
    """Divide, so that transformers, which cuts what it multiplies off, comes to the same width."""
    factor = width / size
    return factor if int(size * factor) == width else nextafter(factor, inf)
