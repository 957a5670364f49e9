"""A directory of Hugging Face with random weights, of a decoder that models/ describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import models
from models.directory import CONFIG_FILE


def write_directory(said: Mapping[str, Any], directory: Path) -> None:
    """Write a ``config.json``, and weights with which every product keeps the size of what it multiplies."""
    decoder, generator = models.find(said["model_type"]).read(said), torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in decoder.tensors().items():
        numbers = torch.randn(tensor.shape, generator=generator)
        if len(tensor.shape) == 1:
            numbers = 0.1 * numbers + int("norm" in name and not decoder.norms.is_zero_centred)
        elif "layers." in name:
            numbers *= tensor.shape[1] ** -0.5
        else:
            numbers /= decoder.embedding_scale
        tensors[name] = numbers
    (directory / CONFIG_FILE).write_text(json.dumps(said))
    save_file(tensors, directory / "model.safetensors")
