"""``config.json`` as a mapping whose values are read by key and by what they must be, or refused with both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from models.checks import Checks, quoted
from models.errors import ModelError

LARGEST, MOST_LAYERS, MOST_EXPERTS = 2**31 - 1, 10_000, 4096
"""Largest size, number of layers and of experts that is read: what is listed or computed of them ends."""
_MOST_LISTED = 1 << 18
CHECKS = Checks(ModelError)
_FULL = "full_attention"


class ConfigJson(Mapping[str, Any]):
    """The keys of a model, completed by the defaults of its class in transformers."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def size(self, key: str, default: int | None = None, most: int = LARGEST) -> int:
        """Read a size; ``default`` stands for a missing key and for null."""
        value = self.get(key)
        return CHECKS.bounded(default if value is None else value, f"config.json: {key}", most)

    def whole(self, key: str) -> int:
        """Read a count or a place."""
        return CHECKS.whole(self.get(key), f"config.json: {key}")

    def number(self, key: str) -> float:
        """Read a finite number."""
        return CHECKS.number(self.get(key), f"config.json: {key}")

    def above_zero(self, key: str) -> float:
        """Read a number above 0."""
        return CHECKS.above_zero(self.get(key), f"config.json: {key}")

    def epsilon(self, key: str) -> float:
        """Read what a norm adds to a variance."""
        return CHECKS.epsilon(self.get(key), f"config.json: {key}")

    @property
    def layer_num(self) -> int:
        """How many layers there are."""
        return self.size("num_hidden_layers", most=MOST_LAYERS)

    @property
    def head_size(self) -> int:
        """Width of a head: what ``head_dim`` says, or the width divided by the heads."""
        if self.get("head_dim") is not None:
            return self.size("head_dim")
        hidden, heads = self.size("hidden_size"), self.size("num_attention_heads")
        if hidden % heads:
            raise ModelError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        return hidden // heads

    def experts(self, key: str) -> int:
        """Count the experts of a layer."""
        count = self.size(key)
        if count > MOST_EXPERTS or count * self.layer_num > _MOST_LISTED:
            raise ModelError(f"expert_num is {count:,}, which no model has", f"the most is {MOST_EXPERTS:,}")
        return count

    def layer_types(self) -> list[str]:
        """List what kind of attention each layer has; empty: it is not said."""
        said = self.get("layer_types") or []
        if not isinstance(said, (list, tuple)):
            raise ModelError(f"config.json: layer_types is {quoted(said)}, not a list")
        if said and len(said) != self.layer_num:
            raise ModelError(f"config.json: layer_types names {len(said)} layers of {self.layer_num}")
        return [_FULL if kind == "attention" else str(kind) for kind in said]
