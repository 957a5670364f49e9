"""Predictors of further tokens for the made-up models of benchmarks.gpu.truth: right often, and not always.

Layers add little, so that a token says most of what follows it; and the predictor takes little of what is before it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREDICTING = "_mtp"  # end of the names of such models
_LITTLE = 0.02


def weaken_layers(model: Any) -> None:
    """Scale what layers add to the residual stream down."""
    for name, numbers in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            numbers.data *= _LITTLE


def add_predictor(config: Any, directory: Path) -> None:
    """Write a predictor behind the layers of a saved model, in DeepSeek's form: its layer is the last one's copy."""
    (file,) = directory.glob("*.safetensors")
    found, width, last = load_file(file), config.hidden_size, config.num_hidden_layers - 1
    layer, place = f"model.layers.{last}.", f"model.layers.{last + 1}."
    found |= {name.replace(layer, place): each.clone() for name, each in found.items() if name.startswith(layer)}
    found |= {f"{place}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    found |= {f"{place}{name}.weight": found[f"{of}.weight"].clone() for name, of in copies.items()}
    found[f"{place}eh_proj.weight"] = torch.eye(width, 2 * width) + _LITTLE * torch.randn(width, 2 * width) / width**0.5
    save_file(found, file, {"format": "pt"})
