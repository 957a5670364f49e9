"""Where the content of shards comes from: the files of a checkpoint, or nowhere, to plan or to measure.

Each source gives a shard by its file name and shape, in the order in which the network is put together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

Shards = Callable[[str, tuple[int, ...]], Tensor]

_SPREAD = 0.02  # of weights: what GPT-2 and NeMo begin a training with


def mapped(directory: Path, dtype: torch.dtype) -> Shards:
    """Map the files, [*shape] each: nothing is read before it is copied."""

    def shard(file: str, shape: tuple[int, ...]) -> Tensor:
        return torch.from_file(str(directory / file), size=torch.Size(shape).numel(), dtype=dtype).view(shape)

    return shard


def planned(dtype: torch.dtype) -> Shards:
    """Give shapes without content, on torch's meta device."""
    return lambda file, shape: torch.empty(shape, dtype=dtype, device="meta")


def made_up(dtype: torch.dtype, device: torch.device) -> Shards:
    """Make random numbers on the device, the same for a file every time: norms' weights around 1, others around 0."""

    def shard(file: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(file.encode()))
        mean = 1.0 if len(shape) == 1 and "weight" in file.split(".") else 0.0
        return torch.empty(shape, dtype=dtype, device=device).normal_(mean, _SPREAD, generator=generator)

    return shard
