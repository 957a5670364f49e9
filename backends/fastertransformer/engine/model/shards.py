"""Sources of shards: mapped files, shapes without content to plan with, or random numbers to measure with.

Each gives a shard by its file name and shape, in the order in which weights.read_model reads them.
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

_STD = 0.02  # of weights, as GPT-2 and NeMo initialize them


def mapped(directory: Path, dtype: torch.dtype) -> Shards:
    """Map files: nothing is read before it is copied."""
    return lambda file, shape: map_file(directory / file, shape, dtype)


def map_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Map a file of raw numbers; an empty tensor has no file.

    Raises:
        WeightsError: the file is missing or has another size.
    """
    if not (size := torch.Size(shape).numel()):
        return torch.empty(shape, dtype=dtype)
    check_file(path, shape, dtype)
    return torch.from_file(str(path), size=size, dtype=dtype).view(shape)


def check_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise a WeightsError if a file is missing or has another size; an empty tensor has no file."""
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
    """Make random numbers, the same for a file every time: norms' weights around 1, other tensors around 0."""

    def shard(file: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(file.encode()))
        mean = 1.0 if len(shape) == 1 and "weight" in file.split(".") else 0.0
        return torch.empty(shape, dtype=dtype, device=device).normal_(mean, _STD, generator=generator)

    return shard
