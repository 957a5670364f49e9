"""Where the content of shards comes from: the files of a checkpoint, or nowhere, to plan or to measure.

Each source gives a shard by its file name and shape, in the order in which the network is put together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..errors import WeightsError

Shards = Callable[[str, tuple[int, ...]], Tensor]
Order = list[tuple[str, tuple[int, ...]]]
"""File name and shape of each shard, as they are asked for."""

_SPREAD = 0.02  # of weights: what GPT-2 and NeMo begin a training with


def mapped(directory: Path, dtype: torch.dtype) -> Shards:
    """Map the files, [*shape] each: nothing is read before it is copied."""
    return lambda file, shape: map_file(directory / file, shape, dtype)


def map_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Map a file of raw numbers; what has no numbers has no file.

    Raises:
        WeightsError: it is missing or has another size.
    """
    if not (size := torch.Size(shape).numel()):
        return torch.empty(shape, dtype=dtype)
    check_file(path, shape, dtype)
    return torch.from_file(str(path), size=size, dtype=dtype).view(shape)


def check_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a file that is missing or has another size; what has no numbers has no file.

    Raises:
        WeightsError: says which and why.
    """
    if torch.Size(shape).numel() and (problem := _problem(path, shape, dtype)):
        raise WeightsError(f"{path}: {problem}")


def planned(dtype: torch.dtype, order: Order) -> Shards:
    """Give shapes without content, on torch's meta device, and list what was asked for."""

    def shard(file: str, shape: tuple[int, ...]) -> Tensor:
        order.append((file, shape))
        return torch.empty(shape, dtype=dtype, device="meta")

    return shard


def problems_of(directory: Path, order: Order, dtype: torch.dtype) -> list[str]:
    """Name the files that are missing or have another size, and say why."""
    found = ((file, _problem(directory / file, shape, dtype)) for file, shape in order)
    return [f"{file}: {problem}" for file, problem in found if problem]


def _problem(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Say what is wrong with a file's size, if anything."""
    expected_bytes = torch.Size(shape).numel() * dtype.itemsize
    try:
        found, is_whole = f"{(size := path.stat().st_size)} bytes", size == expected_bytes
    except OSError as error:
        found, is_whole = f"{error.strerror or error}, 0 bytes", False
    return "" if is_whole else f"{found}, expected {expected_bytes} for {list(shape)}"


def made_up(dtype: torch.dtype, device: torch.device) -> Shards:
    """Make random numbers on the device, the same for a file every time: norms' weights around 1, others around 0."""

    def shard(file: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(file.encode()))
        mean = 1.0 if len(shape) == 1 and "weight" in file.split(".") else 0.0
        return torch.empty(shape, dtype=dtype, device=device).normal_(mean, _SPREAD, generator=generator)

    return shard
