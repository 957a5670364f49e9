"""Tensors of a torch file, mapped in place: a zip of uncompressed records, possibly within a tar.

Format: torch/serialization.py; records ``<prefix>/data.pkl``, ``<prefix>/byteorder``, ``<prefix>/data/<key>``.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import is_shape
from export_scripts.checkpoints.files.pickled import ITEM_BYTES, StoredTensor, as_state, unpickle
from export_scripts.tensors.dtypes import STORAGE, Array
from export_scripts.tensors.mapped import map_record
from handover.errors import CheckpointError

_LOCAL_HEADER_BYTES = 30
_ONE_TENSORS_BYTES = 1024  # most that describe one tensor
_LOCAL_HEADER_MAGIC = b"PK\x03\x04"
# What zipfile raises on damaged input.
_DAMAGE = (
    zipfile.BadZipFile,
    struct.error,
    zlib.error,
    OSError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)

AsState = Callable[[Any, str], Mapping[str, Any]]
"""Takes the tensors by key out of what a file holds, given that and the file's place."""


class TorchFile:
    """One file that torch.save wrote.

    Args:
        archive: the files.
        name: of the file within its archive.
        take_state: takes the tensors by key out of what was saved.
        records: top-level modules whose objects are read as Record.

    Attributes:
        state: its dictionary; tensors are StoredTensor.

    Raises:
        CheckpointError: it is truncated, big-endian or holds foreign objects.
    """

    def __init__(
        self, archive: Archive, name: str, take_state: AsState = as_state, records: Collection[str] = ()
    ) -> None:
        self.name = name
        self._archive = archive
        self._where = f"{archive.path}: {name}"
        try:
            self.state: Mapping[str, Any] = take_state(self._load(records), self._where)
            for value in self.state.values():
                if isinstance(value, StoredTensor):
                    self._check_record(value)
        except _DAMAGE as error:
            raise CheckpointError(
                f"{self._where} is truncated, damaged or no file of torch.save ({error})", "copy the checkpoint again"
            ) from error

    def _load(self, records: Collection[str]) -> Any:
        """Read what was saved, and where its tensors lie."""
        with self._archive.open(self.name) as stream, zipfile.ZipFile(stream) as zipped:
            self._records = {info.filename: info for info in zipped.infolist()}
            self._prefix = self._find_prefix()
            self._check_byte_order(zipped)
            info = self._small_record(f"{self._prefix}data.pkl")
            if info.file_size <= _ONE_TENSORS_BYTES and (tensor := _one_tensor(zipped.read(info))):
                return tensor
            with zipped.open(info) as pickled:
                return unpickle(pickled, self._where, records)

    def _small_record(self, name: str) -> zipfile.ZipInfo:
        """Look up a record that is read whole; torch compresses none, so that a compressed one is a trap."""
        info = self._records[name]
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > self._archive.sizes[self.name]:
            raise CheckpointError(f"{self._where}: record {name} is compressed", "torch.save compresses nothing")
        if not info.CRC:
            del info.CRC  # torch.serialization.set_crc32_options(False): not written
        return info

    def read(self, tensor: StoredTensor) -> Array:
        """Map one tensor, read-only; bf16 comes as uint16."""
        dtype = STORAGE[tensor.storage.data_type]
        if 0 in tensor.shape:
            return np.empty(tensor.shape, dtype)
        extent = self._archive.extent(self.name)
        start, size_bytes, crc32 = self._place(tensor)
        record = map_record(extent.path, extent.offset + start, size_bytes, crc32)
        values = record[tensor.offset * dtype.itemsize : reach(tensor) * dtype.itemsize].view(dtype)
        strides = tuple(step * dtype.itemsize for step in tensor.stride)
        return np.lib.stride_tricks.as_strided(values, tensor.shape, strides, writeable=False)

    def whole(self, tensor: StoredTensor) -> int:
        """Read a tensor of one whole number, which is not negative."""
        start, size_bytes, crc32 = self._place(tensor)
        if size_bytes != ITEM_BYTES.get(tensor.storage.data_type):
            raise CheckpointError(f"{self._where} holds no single number where one is wanted")
        extent = self._archive.extent(self.name)
        return int.from_bytes(map_record(extent.path, extent.offset + start, size_bytes, crc32).tobytes(), "little")

    def has_checksum(self, tensor: StoredTensor) -> bool:
        """Whether the bytes of a tensor have a checksum; torch can be told not to write them."""
        return bool(getattr(self._records[f"{self._prefix}data/{tensor.storage.key}"], "CRC", 0))

    def checksum(self, tensor: StoredTensor) -> tuple[object, ...] | None:
        """Describe a tensor's values without reading them: its view, and its storage's checksum; None: it has none."""
        info = self._records[f"{self._prefix}data/{tensor.storage.key}"]
        view = (tensor.offset, tensor.shape, tensor.stride, tensor.storage.data_type)
        return (info.CRC, info.file_size, *view) if getattr(info, "CRC", 0) else None

    def _place(self, tensor: StoredTensor) -> tuple[int, int, int | None]:
        """Find where a storage begins in the file, its bytes and its CRC-32, which torch can be told not to write.

        torch pads the record's local header, and the directory does not say how much.
        """
        info = self._records[f"{self._prefix}data/{tensor.storage.key}"]
        with self._archive.open(self.name) as stream:
            stream.seek(info.header_offset)
            header = stream.read(_LOCAL_HEADER_BYTES)
        if len(header) < _LOCAL_HEADER_BYTES or not header.startswith(_LOCAL_HEADER_MAGIC):
            raise CheckpointError(f"{self._where}: record {info.filename} is damaged")
        padding = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        start = info.header_offset + _LOCAL_HEADER_BYTES + padding
        if start + info.file_size > self._archive.sizes[self.name]:
            raise CheckpointError(f"{self._where}: record {info.filename} is truncated")
        return start, info.file_size, getattr(info, "CRC", 0) or None

    def _check_record(self, tensor: StoredTensor) -> None:
        """Refuse a tensor that its record cannot fill: it would show a neighbour's bytes."""
        dtype = STORAGE.get(tensor.storage.data_type)
        info = self._records.get(f"{self._prefix}data/{tensor.storage.key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self._where}: record {tensor.storage.key} is missing or compressed")
        if not is_sane(tensor) or (dtype and reach(tensor) * dtype.itemsize > info.file_size):
            raise self._too_small(tensor)

    def _too_small(self, tensor: StoredTensor) -> CheckpointError:
        return CheckpointError(f"{self._where}: record {tensor.storage.key} is smaller than its tensor")

    def _find_prefix(self) -> str:
        pickles = [name for name in self._records if name == "data.pkl" or name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError(f"{self._where} is not a file that torch.save wrote")
        return pickles[0].removesuffix("data.pkl")

    def _check_byte_order(self, records: zipfile.ZipFile) -> None:
        name = f"{self._prefix}byteorder"
        if name in self._records and records.read(self._small_record(name)) != b"little":
            raise CheckpointError(f"{self._where} was written on a big-endian machine")


@lru_cache(maxsize=256)
def _one_tensor(pickled: bytes) -> StoredTensor | None:
    """Read a pickle of one tensor alone: a distributed checkpoint has tens of thousands, and few that differ."""
    with suppress(CheckpointError):
        found = unpickle(io.BytesIO(pickled), "")
        return found if isinstance(found, StoredTensor) else None
    return None


def is_sane(tensor: StoredTensor) -> bool:
    """Whether a view's numbers can be those of a view at all."""
    sizes = (tensor.shape, tensor.stride, (tensor.offset,))
    return all(map(is_shape, sizes)) and len(tensor.shape) == len(tensor.stride)


def reach(tensor: StoredTensor) -> int:
    """Elements of the storage up to the last one that a tensor shows."""
    if 0 in tensor.shape:
        return 0
    return tensor.offset + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
