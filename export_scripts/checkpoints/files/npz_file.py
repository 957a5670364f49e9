"""Arrays of an ``.npz`` file, mapped in place: a zip of uncompressed ``.npy`` records.

Format: numpy, ``lib/format.py`` and ``lib/npyio.py`` (``savez``).
"""

from __future__ import annotations

import struct
import zipfile
from dataclasses import dataclass
from math import prod
from tokenize import TokenError
from typing import Any

import numpy as np

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import is_shape
from export_scripts.tensors.dtypes import STORAGE, Array
from export_scripts.tensors.mapped import map_record
from handover.errors import CheckpointError

_LOCAL_HEADER_BYTES = 30
# jax's bfloat16 is saved as two bytes of no kind.
_DATA_TYPES = {"<f4": "fp32", "<f2": "fp16", "|V2": "bf16", "<V2": "bf16"}
_npy: Any = np.lib.format
# What zipfile and numpy, which reads a header as Python's syntax, raise on damaged input.
_DAMAGE = (
    *(zipfile.BadZipFile, struct.error, OSError, EOFError, ValueError, KeyError, RuntimeError),
    *(SyntaxError, TokenError, TypeError, AttributeError, IndexError, OverflowError, MemoryError, RecursionError),
)


@dataclass(frozen=True)
class NpzArray:
    """One array of an ``.npz`` file.

    Attributes:
        archive, file: where it lies.
        offset, size_bytes: its record in the file, header and all.
        header_bytes: of the record, before the first element.
        crc32: of the record.
        shape: per axis.
        data_type: fp32, fp16, bf16, or numpy's name of another type.
    """

    archive: Archive
    file: str
    offset: int
    size_bytes: int
    header_bytes: int
    crc32: int
    shape: tuple[int, ...]
    data_type: str

    def read(self) -> Array:
        """Map the array, read-only; bf16 comes as uint16."""
        extent = self.archive.extent(self.file)
        record = map_record(extent.path, extent.offset + self.offset, self.size_bytes, self.crc32)
        return record[self.header_bytes :].view(STORAGE[self.data_type]).reshape(self.shape)


def read_npz(archive: Archive, name: str) -> tuple[NpzArray, ...]:
    """List a file's arrays in the order in which they were saved, without reading them.

    Raises:
        CheckpointError: it is truncated, damaged, compressed, or no ``.npz`` file.
    """
    try:
        with archive.open(name) as stream, zipfile.ZipFile(stream) as records:
            return tuple(_array(archive, name, stream, info) for info in records.infolist())
    except _DAMAGE as error:
        raise CheckpointError(
            f"{archive.path}: {name} is truncated, damaged or no .npz file ({error})", "copy the checkpoint again"
        ) from error


def _array(archive: Archive, file: str, stream: Any, info: zipfile.ZipInfo) -> NpzArray:
    """Read the headers of one record; ValueError where they do not fit its bytes."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{info.filename} is compressed")
    stream.seek(info.header_offset)
    header = stream.read(_LOCAL_HEADER_BYTES)
    start = info.header_offset + _LOCAL_HEADER_BYTES + sum(struct.unpack("<2H", header[26:30]))
    stream.seek(start)
    read_header = {(1, 0): _npy.read_array_header_1_0, (2, 0): _npy.read_array_header_2_0}[_npy.read_magic(stream)]
    shape, is_fortran, dtype = read_header(stream)
    header_bytes, size_bytes = stream.tell() - start, info.file_size
    if is_fortran and len(shape) > 1:
        raise ValueError(f"{info.filename} is stored by columns")
    is_fitting = is_shape(shape) and header_bytes + prod(shape) * dtype.itemsize == size_bytes
    if not is_fitting or start + size_bytes > archive.sizes[file]:
        raise ValueError(f"{info.filename} is truncated")
    data_type = _DATA_TYPES.get(dtype.str, str(dtype))
    return NpzArray(archive, file, start, size_bytes, header_bytes, info.CRC, tuple(shape), data_type)
