"""Tiny models of the Llama family as the engine opens them: saved as the hub has them, and converted to shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.fastertransformer.engine.model.precision import TORCH_TYPES
from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from support.tiny_models.llama_models import save

WITH_SHARDS = ("llama_mha", "llama", "llama_linear")
"""What the community's FasterTransformer computes."""


def shards_of(name: str, folder: Path, ranks: int, data_type: str = "fp32", **changes: Any) -> tuple[Path, Any]:
    """Save and convert a model of llama_models -> its shards for that many ranks, and transformers' model."""
    model = save(name, folder / "hub", **changes)
    root = folder / f"{ranks}-gpu"
    convert(ConvertArguments(folder / "hub", root, ranks, data_type))
    return root, model


def served_of(name: str, folder: Path, ranks: int, data_type: str = "fp32", **changes: Any) -> tuple[Path, Any]:
    """Save a model -> its shards, or the hub's directory of what has none; and transformers' model."""
    if name in WITH_SHARDS:
        return shards_of(name, folder, ranks, data_type, **changes)
    return folder / "hub", save(name, folder / "hub", TORCH_TYPES[data_type], **changes)


def settings_of(name: str, folder: Path, ranks: int = 1) -> tuple[Any, Settings]:
    """Do the same, and return the settings with which one process opens it in fp32."""
    root, model = served_of(name, folder, ranks)
    return model, Settings(root, ranks, 1, "fp32", 1, "Llama")
