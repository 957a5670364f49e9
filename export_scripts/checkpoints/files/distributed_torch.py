"""Distributed checkpoints of torch (``torch_dist``): ``.metadata`` says which bytes of which ``.distcp`` file are what.

Format: torch, ``distributed/checkpoint/{metadata,filesystem}.py``; megatron-core,
``dist_checkpointing/strategies/torch.py``. A chunk is a whole file of torch.save within a ``.distcp`` file; its tensor
is mapped in place. The metadata's classes are not imported: their objects are read as plain records.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np

from export_scripts.checkpoints.files.archive import Archive, Extent
from export_scripts.checkpoints.files.chunked import ChunkedTensor, ChunkTable
from export_scripts.checkpoints.files.distributed_metadata import (
    METADATA_FILE,
    Described,
    Index,
    Stored,
    read_metadata,
)
from export_scripts.checkpoints.files.pickled import Record, StoredTensor
from export_scripts.checkpoints.files.torch_file import TorchFile
from export_scripts.checkpoints.files.torch_format import open_torch_file
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.values import Fields, entries, text, whole
from export_scripts.weights.values import sizes as checked_sizes
from handover.errors import CheckpointError
from models.checks import shown

# Modules whose objects training leaves beside the weights: arguments, callbacks, schedules. None is imported.
TRAINING_MODULES = (
    *("argparse", "apex", "collections", "datetime", "enum", "fp16", "lightning", "megatron", "nemo", "nemo_run"),
    *("numpy", "omegaconf", "pathlib", "pytorch_lightning", "torch", "transformer_engine"),
)
_ROOT = "tensor"
_KEPT = 16  # chunks that stay mapped


@dataclass(frozen=True)
class TorchDist:
    """What a folder holds; only the metadata are read.

    Attributes:
        tensors: by key.
        objects: what reads the value of each key that is no tensor.
        paths: how keys of nested dictionaries came about, where torch flattened them.
    """

    tensors: Mapping[str, ChunkedTensor]
    objects: Mapping[str, Callable[[], Any]]
    paths: Mapping[str, tuple[Any, ...]]


def read_torch_dist(archive: Archive, folder: str) -> TorchDist:
    """Read the metadata of a folder.

    Args:
        archive: the files.
        folder: of the checkpoint within them, with a slash at its end.

    Raises:
        CheckpointError: the metadata are damaged, or name files or bytes that are not there.
    """
    where = f"{archive.path}: {folder}{METADATA_FILE}"
    metadata = read_metadata(archive, folder, where)
    fields = Fields(vars(metadata) if isinstance(metadata, Record) else metadata, where)
    stored, described = fields.fields("storage_data"), fields.fields("state_dict_metadata")
    places = _Places(_Files(archive, folder, where, archive.sizes))
    tensors = {
        str(key): places.tensor(str(key), entry, stored)
        for key, entry in described.items()
        if isinstance(entry, Described)
    }
    others = [str(key) for key in described if str(key) not in tensors]
    paths = fields.get("planner_data")
    return TorchDist(
        tensors,
        {key: partial(_object, places.files, key, _find(stored, key, None)) for key in others},
        {str(key): path for key, path in paths.items() if isinstance(path, tuple)} if isinstance(paths, dict) else {},
    )


@dataclass(frozen=True)
class _Files:
    """The files of a folder: their names below it are in ``numbers``."""

    archive: Archive
    folder: str
    where: str
    sizes: Mapping[str, int]
    names: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def place(self, key: str, stored: Stored) -> tuple[str, int, int]:
        """Name the file and the bytes of what is stored; both must be there."""
        where = f"{self.where}: {shown(key)}"
        name = f"{self.folder}{text(stored.relative_path, f'{where}: relative_path')}"
        offset, length = whole(stored.offset, f"{where}: offset"), whole(stored.length, f"{where}: length")
        if stored.transform_descriptors:
            said = shown(stored.transform_descriptors)
            raise CheckpointError(f"{self.archive.path}: {key} is stored through {said}, which is not read")
        if offset + length > self.sizes.get(name, -1):
            raise CheckpointError(f"{self.archive.path}: {key} is not within {name}", "copy the checkpoint again")
        return name, offset, length

    def within(self, key: str, name: str, offset: int, length: int) -> Archive:
        """Show a run of a file's bytes as a file of its own."""
        beneath = self.archive.extent(name)
        return Archive(self.archive.path, {key: Extent(beneath.path, beneath.offset + offset, length)})


class _Places:
    """Where all chunks lie: what of the metadata is kept.

    Attributes:
        files: that hold them.
        numbers: file, offset and length in it of each chunk, one chunk after another.
        chunk: maps a tensor's chunk, given its key, its number among those of all tensors, and its sizes.
        corners: the offsets of a tensor's chunks in it, then their sizes; one tensor after another.
    """

    def __init__(self, files: _Files) -> None:
        self.files = files
        self.numbers, self.corners = array("q"), array("q")
        self.chunk = lru_cache(_KEPT)(self._map)  # query, key and value of a layer are in the same ones

    def tensor(self, key: str, entry: Described, all_stored: Mapping[Any, Any]) -> ChunkedTensor:
        """Describe a tensor."""
        where = f"{self.files.where}: {shown(key)}"
        lows, sizes, shape = array("q"), array("q"), checked_sizes(entry.size, f"{where}: size")
        first = len(self.numbers) // 3
        for chunk in entries(entry.chunks, f"{where}: chunks"):
            low = checked_sizes(getattr(chunk, "offsets", None), f"{where}: offsets")
            size = checked_sizes(getattr(chunk, "sizes", None), f"{where}: sizes")
            if 0 in size and 0 not in shape:
                continue  # of a rank that had no rows left
            stored = _find(all_stored, key, low)
            if not len(low) == len(shape) == len(size) or stored is None:
                raise CheckpointError(f"{where} has a chunk at {list(low)} that lies nowhere", "copy it again")
            name, offset, length = self.files.place(key, stored)
            if name not in self.files.numbers:
                self.files.numbers[name] = len(self.files.names)
                self.files.names.append(name)
            self.numbers.extend((self.files.numbers[name], offset, length))
            lows.extend(low)
            sizes.extend(size)
        at = len(self.corners)
        self.corners += lows + sizes
        count = len(self.numbers) // 3 - first
        data_type = str(getattr(entry.properties, "dtype", ""))
        return ChunkedTensor(key, shape, data_type, _Chunks(self, key, len(shape), first, count, at))

    def _map(self, key: str, number: int, sizes: tuple[int, ...]) -> Array:
        """Map a tensor's chunk, by its number among those of all tensors."""
        file, offset, length = self.numbers[3 * number : 3 * number + 3]
        found = TorchFile(self.files.within(key, self.files.names[file], offset, length), key, _root)
        tensor = found.state[_ROOT]
        if not isinstance(tensor, StoredTensor) or tensor.shape != sizes:
            path = self.files.archive.path
            raise CheckpointError(f"{path}: {key} holds no chunk of {list(sizes)}", "copy the checkpoint again")
        return found.read(tensor)


def _find(stored: Mapping[Any, Any], key: str, offsets: tuple[int, ...] | None) -> Stored | None:
    """Find what is stored for a chunk, or for an object; None: nothing is."""
    found = stored.get(Index.of(key, offsets))
    return found if isinstance(found, Stored) else None


class _Chunks(ChunkTable):
    """The chunks of one tensor."""

    __slots__ = ("_at", "_axes", "_count", "_first", "_key", "_places")

    def __init__(self, places: _Places, key: str, axes: int, first: int, count: int, at: int) -> None:
        self._places, self._key, self._axes = places, key, axes
        self._first, self._count, self._at = first, count, at

    def __len__(self) -> int:
        return self._count

    def corners(self) -> tuple[Array, Array]:
        low, sizes = (self._at + part * self._count * self._axes for part in range(2))
        parts = (self._places.corners[start : start + self._count * self._axes] for start in (low, sizes))
        first, second = (np.array(part, np.int64).reshape(self._count, self._axes) for part in parts)
        return first, second

    def map(self, number: int, sizes: tuple[int, ...]) -> Array:
        return self._places.chunk(self._key, self._first + number, sizes)


def _object(files: _Files, key: str, stored: Stored | None) -> Any:
    """Read what is no tensor."""
    if stored is None:
        raise CheckpointError(f"{files.where}: {shown(key)} lies nowhere", "copy the checkpoint again")
    within = files.within(key, *files.place(key, stored))
    return open_torch_file(within, key, _root, TRAINING_MODULES).state[_ROOT]


def _root(content: Any, where: str) -> Mapping[str, Any]:
    return {_ROOT: content}
