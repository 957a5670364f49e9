"""LoRA adapters for tiny models of transformers: PEFT's directories, and the models that they make by merging."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PREFIX = "base_model.model."
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STATES = (
    *("in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba"),
    *("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
"""Those of layers with states."""

Pairs = dict[str, tuple[Tensor, Tensor]]
"""lora_A and lora_B by the name of their module."""


def draw(model: Any, seed: int, rank: int = 4, targets: Iterable[str] = ALL, ranks: Mapping[str, int] = {}) -> Pairs:
    """Draw matrices for the linear layers with these last words; ``ranks`` are those of some."""
    generator, found = torch.Generator().manual_seed(seed), Pairs()
    for name, module in model.named_modules():
        word = name.rpartition(".")[2]
        if word in targets and isinstance(module, torch.nn.Linear):
            own = ranks.get(word, rank)
            down = torch.randn(own, module.in_features, generator=generator) * module.in_features**-0.5
            found[name] = down, torch.randn(module.out_features, own, generator=generator) * 0.15
    assert found
    return found


def write(directory: Path, pairs: Pairs, **settings: Any) -> Path:
    """Write PEFT's two files; ``settings`` are of LoraConfig."""
    directory.mkdir(parents=True, exist_ok=True)
    rank = next(iter(pairs.values()))[0].shape[0]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"{PREFIX}{name}.lora_{side}.weight": pair[n] for name, pair in pairs.items() for n, side in enumerate("AB")
    }
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
    return directory


def merged(model: Any, pairs: Pairs, scale: float = 1.0, scales: Mapping[str, float] = {}) -> Any:
    """Return the model with scale * B A added to its weights; ``scales`` are those of some modules, by last word."""
    changed = deepcopy(model)
    with torch.no_grad():
        for name, (down, up) in pairs.items():
            own = scales.get(name.rpartition(".")[2], scale)
            changed.get_submodule(name).weight += own * (up @ down)
    return changed
