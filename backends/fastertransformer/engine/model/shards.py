"""Sources of stored numbers: mapped files, shapes without content to plan with, or random numbers to measure with.

Each returns a piece of a file, in the order in which weights.read_model reads them: a whole shard, or a part of a file
of safetensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import WeightsError


class Piece(NamedTuple):
    """Numbers of a file that belong to one tensor.

    Attributes:
        name: of the tensor's part, for random numbers.
        shape: of the numbers.
        dtype: of the numbers in the file.
        file: name of the file; empty where no file is read.
        offset: of the first byte; 0: the piece is the whole file, for one of safetensors begins with its header.
        stride_bytes: from a row, the first axis, to the next one; 0: they follow each other.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    offset: int = 0
    stride_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the numbers."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes that follow each other: of a row, or of all numbers."""
        return self.size_bytes // self.shape[0] if self.stride_bytes else self.size_bytes

    @property
    def end(self) -> int:
        """The place behind its last byte in the file."""
        rows = self.shape[0] if self.stride_bytes else 1
        return self.offset + (rows - 1) * self.stride_bytes + self.row_bytes


Shards = Callable[[Piece], Tensor]
Order = list[Piece]
"""Pieces as they are asked for."""

_STD = 0.02  # of weights, as GPT-2 and NeMo initialize them
_POWER = 127 - 7  # which makes numbers of 4 bits about as large


def mapped(directory: Path) -> Shards:
    """Map files: nothing is read before it is copied."""
    return lambda piece: map_piece(directory, piece)


def map_piece(directory: Path, piece: Piece) -> Tensor:
    """Map a piece of a file; one without numbers has no file.

    Raises:
        WeightsError: the file is missing or has another size.
    """
    if not piece.size_bytes:
        return torch.empty(piece.shape, dtype=piece.dtype)
    check_file(directory, piece)
    content = torch.from_file(str(directory / piece.file), size=piece.end, dtype=torch.uint8)
    rows = piece.shape[0] if piece.stride_bytes else 1
    found = content.as_strided((rows, piece.row_bytes), (piece.stride_bytes or piece.row_bytes, 1), piece.offset)
    if piece.offset % piece.dtype.itemsize:  # the format does not align what lies behind another type
        found = found.clone()
    return found.view(piece.dtype).view(piece.shape)


def map_file(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Map a file of raw numbers; see map_piece."""
    return map_piece(path.parent, Piece(path.name, shape, dtype, path.name))


def check_file(directory: Path, piece: Piece) -> None:
    """Raise a WeightsError if a file is missing or has another size; a piece without numbers has no file."""
    if problem := _problem(directory, piece):
        raise WeightsError(f"{directory / piece.file}: {problem}")


def planned(order: Order) -> Shards:
    """Return shapes without content, on torch's meta device, and list what was asked for."""

    def shard(piece: Piece) -> Tensor:
        order.append(piece)
        return torch.empty(piece.shape, dtype=piece.dtype, device="meta")

    return shard


def problems_of(directory: Path, order: Order) -> list[str]:
    """Name the files that are missing or have another size, and say why."""
    found = ((piece.file, _problem(directory, piece)) for piece in order)
    return [f"{file}: {problem}" for file, problem in found if problem]


def _problem(directory: Path, piece: Piece) -> str:
    """Return what is wrong with a file's size, if anything."""
    if not piece.size_bytes:
        return ""
    try:
        size = (directory / piece.file).stat().st_size
        found, is_whole = f"{size} bytes", size >= piece.end if piece.offset else size == piece.size_bytes
    except OSError as error:
        found, is_whole = f"{error.strerror or error}, 0 bytes", False
    return "" if is_whole else f"{found}, expected {piece.end} for {list(piece.shape)}"


def made_up(dtype: torch.dtype, device: torch.device) -> Shards:
    """Make random numbers, the same for a piece every time: norms' weights around 1, other tensors around 0.

    Those of FP8 are larger, and of MXFP4 any; the scales of all of them are the same.
    """

    def shard(piece: Piece) -> Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(piece.name.encode()))
        mean = 1.0 if len(piece.shape) == 1 and "weight" in piece.name.split(".") else 0.0
        numbers = torch.empty(piece.shape, dtype=dtype, device=device)
        if piece.dtype == torch.uint8:
            numbers = torch.empty(piece.shape, dtype=torch.uint8, device=device)
            return numbers.fill_(_POWER) if piece.name.endswith(".scales") else numbers.random_(generator=generator)
        if piece.name.endswith(".scales"):
            return numbers.fill_(_STD)
        if piece.dtype == torch.float8_e4m3fn:
            return numbers.normal_(generator=generator).to(piece.dtype)
        return numbers.normal_(mean, _STD, generator=generator)

    return shard
