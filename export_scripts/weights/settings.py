"""``config.json`` of a checkpoint as a table of weights reads it."""

from __future__ import annotations

from typing import Any

from export_scripts.weights.values import Fields, epsilon, positive
from handover.errors import CheckpointError
from models.blocks.feed_forward import EXACT_GELU, TANH_GELU

REQUIRED: Any = object()


class Settings(Fields):
    """``config.json`` of a checkpoint, with errors that name the key."""

    def __init__(self, values: Any) -> None:
        super().__init__(values, "config.json")

    def size(self, key: str, default: Any = REQUIRED) -> int:
        """Read a positive number; ``default`` stands for a missing key and for null.

        Raises:
            CheckpointError: it is none.
        """
        value = self.get(key)
        value = default if value is None and default is not REQUIRED else value
        return positive(value, f"config.json: {key}")

    def epsilon(self, key: str) -> float:
        """Read a norm's epsilon, 1e-5 where there is none; CheckpointError: no norm can have it."""
        return epsilon(self.get(key, 1e-5), f"config.json: {key}")

    def activation(self, key: str, default: str) -> str:
        """Translate the feed-forward's function to FasterTransformer's name; empty: it has none for it."""
        name = self.get(key, default)
        return "Gelu" if name in (*TANH_GELU, *EXACT_GELU) else "Relu" if name == "relu" else ""

    def head_size(self, hidden_key: str, heads_key: str) -> int:
        """Divide the width by the heads.

        Raises:
            CheckpointError: it is no multiple.
        """
        hidden, heads = self.size(hidden_key), self.size(heads_key)
        if hidden % heads:
            raise CheckpointError(f"config.json: {hidden_key} {hidden} is not a multiple of {heads_key} {heads}")
        return hidden // heads
