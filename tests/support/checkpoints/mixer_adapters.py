"""LoRA adapters of Megatron-Bridge on layers with states of the tiny hybrids, as its training ranks store them.

Written from Megatron-Bridge, ``peft/utils.py`` (``ParallelLinearAdapter.sharded_state_dict``: linear_out of Mamba's
``in_proj`` section by section) and ``peft/adapter_wrapper.py``, not from this project's tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from support.checkpoints.core_adapters import BASE, LORA, Products
from support.checkpoints.hybrid_models import sections
from support.checkpoints.llama_adapters import ALPHA, RANK
from support.checkpoints.llama_files import ChunkedArray, write_torch_dist
from support.tiny_models.llama_models import Saved

_PLACES = {"mixer": "mixer", "mamba": "mamba_mixer", "linear_attn": "self_attention"}
"""megatron-core's word for each of transformers'."""


def products(source: Saved, words: tuple[str, ...] = ("in_proj", "out_proj")) -> Products:
    """Draw linear_in and linear_out of the layers with these last words, by transformers' names of the weights."""
    generator, found = torch.Generator().manual_seed(3), Products()
    for key, weight in source.tensors.items():
        if key.removesuffix(".weight").rpartition(".")[2] in words:
            down = torch.randn(RANK, weight.shape[1], generator=generator) / 8
            found[key] = down, torch.randn(weight.shape[0], RANK, generator=generator) / 8
    assert found
    return found


def write_adapter(root: Path, model: Path, source: Saved, ranks: int, added: Products) -> Path:
    """Write an iteration that holds an adapter alone, of a training whose model is written already."""
    arrays: dict[str, ChunkedArray] = {}
    for key, (down, up) in added.items():
        _, _, layer, mixer, word, _ = key.split(".")
        place = f"decoder.layers.{layer}.{'mlp' if 'latent' in word else _PLACES[mixer]}.{word}.adapter"
        axis = 1 if word == "out_proj" else 0  # a row-parallel layer's input is cut, and else the rank
        arrays[f"{place}.linear_in.weight"] = _cut(down, ranks, axis)
        if word == "in_proj":
            sizes = _sections(source.config)
            for name, rows in zip(sizes, up.split(list(sizes.values())), strict=True):
                arrays[f"{place}.linear_out.weight.{name}"] = _cut(rows, ranks)
        else:
            arrays[f"{place}.linear_out.weight"] = _cut(up, ranks)
    folder = root / "iter_0000007"
    folder.mkdir(parents=True)
    run = yaml.safe_load((model / "iter_0000007/run_config.yaml").read_text())
    run["model"]["tensor_model_parallel_size"] = ranks
    peft = {"_target_": LORA, "dim": RANK, "alpha": ALPHA, "target_modules": ["in_proj", "out_proj"]}
    run |= {"peft": peft, "checkpoint": {"pretrained_checkpoint": BASE}}
    (folder / "run_config.yaml").write_text(yaml.safe_dump(run))
    (root / "latest_checkpointed_iteration.txt").write_text("7")
    write_torch_dist(folder, arrays, prefix="", common={"iteration": 7, "content_metadata": {}})
    return root


def _sections(config: Any) -> dict[str, int]:
    if hasattr(config, "mamba_num_heads"):
        return sections(config, "in_proj")
    inner, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    return {"z": inner, "x": inner, "B": shared, "C": shared, "dt": config.mamba_n_heads}


def _cut(value: torch.Tensor, ranks: int, axis: int = 0) -> ChunkedArray:
    size = value.shape[axis] // ranks
    places = ((0, rank * size) if axis else (rank * size, 0) for rank in range(ranks))
    parts = (part.contiguous() for part in value.chunk(ranks, axis))
    return ChunkedArray(tuple(value.shape), list(zip(places, parts, strict=True)))
