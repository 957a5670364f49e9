"""Tensors of a safetensors file, mapped in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.tensors.dtypes import STORAGE, Array
from export_scripts.tensors.mapped import map_record
from export_scripts.tensors.small_floats import BYTES
from handover.errors import CheckpointError
from models.safetensors import read_header


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """One tensor of a safetensors file.

    Attributes:
        archive, file: where it lies.
        offset: of its first byte in the file.
        shape: per axis.
        data_type: fp32, fp16, bf16 or another name.
        axis: always None; the tensor is in one part.
    """

    archive: Archive
    file: str
    offset: int
    shape: tuple[int, ...]
    data_type: str
    axis: int | None = None

    @property
    def unproved(self) -> tuple[str, ...]:
        """The file: the format has no checksums."""
        return (self.file,)

    def parts(self) -> tuple[Array, ...]:
        """Map the tensor, read-only; bf16 comes as uint16, and numbers of 8 bits as bytes."""
        dtype = np.dtype(np.uint8) if self.data_type in BYTES else STORAGE[self.data_type]
        if 0 in self.shape:
            return (np.empty(self.shape, dtype),)
        extent = self.archive.extent(self.file)
        record = map_record(extent.path, extent.offset + self.offset, prod(self.shape) * dtype.itemsize)
        return (record.view(dtype).reshape(self.shape),)


def read_safetensors(archive: Archive, name: str) -> Mapping[str, SafeTensor]:
    """List a file's tensors without reading them.

    Raises:
        CheckpointError: it is truncated, damaged, or no safetensors file.
    """
    with archive.open(name) as stream:
        header = read_header(stream, archive.sizes[name], f"{archive.path}: {name}", CheckpointError)
    return {key: SafeTensor(archive, name, each.offset, each.shape, each.data_type) for key, each in header.items()}
