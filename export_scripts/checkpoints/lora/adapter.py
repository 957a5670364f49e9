"""A LoRA adapter, opened: what it adds to which weights, and which tensors it replaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from export_scripts.checkpoints.lora.update import Update
from export_scripts.weights.schema import LazyTensor

KIND = "lora"
"""Folder of these companions in a checkpoint's archive."""


@dataclass(frozen=True)
class Adapter:
    """An adapter; of its weights nothing is read yet.

    Attributes:
        name: of its file or directory.
        where: its path, for errors.
        replaced: tensors that stand in the place of the model's, by the names of which the model has one.
    """

    name: str
    where: str
    updates: tuple[Update, ...]
    replaced: Mapping[tuple[str, ...], LazyTensor] = field(default_factory=dict)
