"""Damages to converted shards: what ``benchmarks.parity.limits`` plants, and parity has to find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from evaluation.parity.formats import TYPES

RANKS, HIDDEN, HEADS = 2, 256, 8


@dataclass(frozen=True)
class Family:
    """A family: its config.pbtxt's model_type, how transformers builds it, and shards of it that defects touch."""

    model_type: str
    layers: int
    build: Callable[[int], Any] | None
    query: str
    middle: str
    norm: str
    final_norm: str


def _nothing(shards: Path, family: Family) -> None:
    pass


def _swap_heads(shards: Path, family: Family) -> None:
    """Two heads' queries, keys and values change places in one shard of one layer."""
    path = shards / f"{family.query}.1.bin"
    raw = np.fromfile(path, np.uint8).reshape(HIDDEN, 3, HEADS // RANKS, -1)
    raw[:, :, [0, 1]] = raw[:, :, [1, 0]]
    raw.tofile(path)


def _swap_shards(shards: Path, family: Family) -> None:
    """One matrix's two shards change places."""
    first, second = (shards / f"{family.middle}.{rank}.bin" for rank in range(RANKS))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _coarsen(shards: Path, family: Family) -> None:
    """All matrices of the layers as if quantised with 4 bits and one scale each."""
    for path in shards.glob("*.weight.?.bin"):
        if "layers." in path.name or "block." in path.name:
            weight = np.fromfile(path, np.float16).astype(np.float32)
            scale = np.abs(weight).max() / 7
            (np.rint(weight / scale) * scale).astype(np.float16).tofile(path)


def _scale(factor: float, name: str) -> Callable[[Path, Family], None]:
    """Multiply a file's numbers."""

    def damage(shards: Path, family: Family) -> None:
        def change(numbers: Tensor) -> Tensor:
            first = len(numbers) * 96 // 512 if name == "model.wpe" else 0  # positions from 96 on
            numbers[first:] *= factor
            return numbers

        change_numbers(shards, f"{getattr(family, name, name)}.bin", change)

    return damage


def change_numbers(shards: Path, file: str, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the numbers of a file, [n] in fp32, by what becomes of them, as many."""
    path, ini = shards / file, (shards / "config.ini").read_text()
    dtype = next(dtype for kind, dtype in TYPES.items() if f"weight_data_type = {kind}" in ini)
    numbers = torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype).float()
    path.write_bytes(change(numbers).to(dtype).contiguous().view(torch.uint8).numpy().tobytes())


DAMAGES: dict[str, Callable[[Path, Family], None]] = {
    "sound": _nothing,
    "norm x 1.02": _scale(1.02, "norm"),
    "final norm x 1.02": _scale(1.02, "final_norm"),
    "positions zeroed": _scale(0.0, "model.wpe"),
    "heads swapped": _swap_heads,
    "shards swapped": _swap_shards,
    "drifted": _coarsen,
}
