"""What the keys of a configuration say of a rotation's scaling, read and checked.

Keys and defaults: transformers, ``modeling_rope_utils.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.checks import shown
from models.config_json import CHECKS, LARGEST
from models.errors import ModelError

ORIGINAL, ATTENTION = "original_max_position_embeddings", "attention_factor"
_MOST_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class Said:
    """What a mapping says of a rotation.

    Attributes:
        rope: the mapping, complete.
        where: it stands, for errors.
        longest: text of the model: ``max_position_embeddings``.
    """

    rope: Mapping[str, Any]
    where: str
    longest: Any

    def above_zero(self, key: str) -> float:
        """Read a number above 0."""
        return CHECKS.above_zero(self.rope.get(key), f"{self.where}: {key}")

    def unless_said(self, key: str, default: float) -> float:
        """Read a number above 0; null and 0 are the default, as to transformers."""
        return self.above_zero(key) if self.rope.get(key) else default

    def original(self) -> int:
        """Read how long texts were before."""
        return CHECKS.bounded(self.rope.get(ORIGINAL, self.longest), f"{self.where}: {ORIGINAL}", LARGEST)

    def factor(self) -> float:
        """Read what texts have become longer by; null: by what the lengths say."""
        if self.rope.get("factor") is None and "factor" in self.rope:
            return CHECKS.bounded(self.longest, "config.json: max_position_embeddings", LARGEST) / self.original()
        return self.above_zero("factor")

    def attention_factor(self) -> float | None:
        """Read what sines and cosines are multiplied by; None: it is not said."""
        return None if self.rope.get(ATTENTION) is None else self.above_zero(ATTENTION)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Read a list of numbers above 0."""
        values = self.rope.get(key)
        if not isinstance(values, (list, tuple)) or not 0 < len(values) <= _MOST_ELEMENTS:
            raise ModelError(f"{self.where}: {key} is {shown(values)}, not a list of numbers above 0")
        return tuple(CHECKS.above_zero(value, f"{self.where}: {key}") for value in values)
