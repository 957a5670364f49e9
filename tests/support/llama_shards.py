"""Tiny models of the Llama family as the engine opens them: saved as the hub has them, and converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.fastertransformer.engine.settings import Settings
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from support.llama_models import save


def shards_of(name: str, folder: Path, ranks: int, data_type: str = "fp32", **changes: Any) -> tuple[Path, Any]:
    """Save and convert a model of llama_models -> its shards for that many ranks, and transformers' model."""
    model = save(name, folder / "hub", **changes)
    root = folder / f"{ranks}-gpu"
    convert(ConvertArguments(folder / "hub", root, ranks, data_type))
    return root, model


def settings_of(name: str, folder: Path, ranks: int = 1) -> tuple[Any, Settings]:
    """Do the same, and give the settings with which one process opens it in fp32."""
    root, model = shards_of(name, folder, ranks)
    return model, Settings(root, ranks, 1, "fp32", 1, "Llama")
