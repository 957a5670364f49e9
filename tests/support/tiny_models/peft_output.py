"""What PEFT computes with the directories that ``--format=peft`` writes, stored in tests/data/peft as ``out_*``.

Made by PEFT 0.21.2 (``pip install peft==0.21.2``), from the repository's root:

    PYTHONPATH=tests:. python -m support.tiny_models.peft_output tests/data/peft

The model is transformers' own and the directory of the adapter this project's; the logits are in fp32.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from support.checkpoints.core_adapters import (
    APART,
    CANONICAL,
    LORA,
    Products,
    expert_arrays,
    expert_products,
    write_bridge,
    write_bridge_adapter,
)
from support.checkpoints.llama_adapters import ALPHA, RANK, products
from support.checkpoints.llama_files import ChunkedArray
from support.tiny_models.llama_models import build, logits

CASES = {
    "llama": ("llama", LORA, 2),
    "qwen3_canonical": ("qwen3", CANONICAL, 2),
    "nemotron": ("nemotron", LORA, 1),
    "some": ("llama", CANONICAL, 1),
    "experts": ("mixtral", LORA, 2),
}


def added(case: str) -> Products:
    """The matrices of an adapter by transformers' names, as PEFT's directory has them; ``some`` has none of k and gate.

    ``experts`` are of half the rank of attention, and of twice its scale (``normalize_moe_lora``).
    """
    name, target, _ = CASES[case]
    if case == "experts":
        filled = {key: (_filled(down, 0), 2 * _filled(up, 1)) for key, (down, up) in _expert_pairs().items()}
        return {**_attention_pairs(), **filled}
    every = products(name, is_fused=target == LORA)
    if case != "some":
        return every
    return {key: pair for key, pair in every.items() if not any(word in key for word in ("k_proj", "gate_proj"))}


def _attention_pairs() -> Products:
    return {key: pair for key, pair in products("mixtral", is_fused=True).items() if "o_proj" in key}


def _expert_pairs() -> Products:
    return expert_products("mixtral", APART, RANK // 2)


def _filled(value: torch.Tensor, axis: int) -> torch.Tensor:
    return torch.cat([value, torch.zeros_like(value)], axis)


def write(case: str, folder: Path) -> tuple[Path, Path]:
    """Write a model and its adapter as Megatron-Bridge does."""
    name, target, ranks = CASES[case]
    model = write_bridge(folder / "model", name, 1, None)
    if case == "experts":
        arrays = expert_arrays(name, APART, ranks, _expert_pairs())
        for key, pair in _attention_pairs().items():
            for side, value in zip(("in", "out"), pair, strict=True):
                place = f"decoder.layers.{key.split('.')[2]}.self_attention.linear_proj.adapter.linear_{side}.weight"
                arrays[place] = ChunkedArray(tuple(value.shape), [((0, 0), value)])
        lora = {"_target_": LORA, "dim": RANK, "alpha": ALPHA, "normalize_moe_lora": True}
        lora["share_expert_adapters"] = False
        return model, write_bridge(folder / "adapter", name, ranks, arrays, peft=lora)
    return model, write_bridge_adapter(folder / "adapter", name, ranks, added(case), target)


def assert_holds(made: Path, wanted: Products) -> None:
    """Compare the tensors of a directory with matrices by transformers' names, bit by bit."""
    named = {
        f"base_model.model.{key.removesuffix('weight')}lora_{letter}.weight": value
        for key, pair in wanted.items()
        for letter, value in zip("AB", pair, strict=True)
    }
    tensors = load_file(made / "adapter_model.safetensors")
    assert tensors.keys() == named.keys()
    assert all(torch.equal(tensors[key], value) for key, value in named.items())


def record(case: str, data: Path) -> None:
    """Load one with PEFT, and keep its logits."""
    import peft  # type: ignore[import-not-found]  # it is needed to make the data, not to read it

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, adapter = write(case, folder)
        convert(ConvertArguments(model, folder / "peft", 1, "fp32", adapter=adapter, format="peft", base_model="base"))
        loaded = peft.PeftModel.from_pretrained(build(CASES[case][0]), folder / "peft")
        np.save(data / f"out_{case}.logits.npy", logits(loaded))
        shutil.copy(folder / "peft/adapter_config.json", data / f"out_{case}.json")


if __name__ == "__main__":
    for each in CASES:
        record(each, Path(sys.argv[1]))
