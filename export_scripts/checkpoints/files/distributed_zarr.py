"""Distributed checkpoints in zarr's format, version 2: a folder for each array, a file for each chunk, mapped in place.

Format: zarr's specification, version 2; megatron-core, ``dist_checkpointing/strategies/zarr.py`` (a key is a folder,
``bfloat16`` stands for a type that numpy lacks).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Set
from math import prod
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.files.chunked import Chunk, ChunkedTensor
from export_scripts.tensors.dtypes import STORAGE, Array
from export_scripts.tensors.mapped import map_record
from export_scripts.weights.values import Fields
from handover.errors import CheckpointError
from models.checks import shown

_HEADER = "/.zarray"
_SEPARATORS = (".", "/")
_CHUNK = re.compile(r"/\d+(?:[./]\d+)*$")
_DATA_TYPES = {"<f4": "fp32", "<f2": "fp16", "bfloat16": "bf16"}


def read_zarr(archive: Archive, folder: str) -> dict[str, ChunkedTensor]:
    """List the arrays below a folder; only their headers are read.

    Args:
        archive: the files.
        folder: of the checkpoint within them, with a slash at its end.

    Raises:
        CheckpointError: an array is compressed, incomplete, or stored in a way that megatron-core does not use.
    """
    headers = [name for name in archive.sizes if name.startswith(folder) and name.endswith(_HEADER)]
    found: dict[str, set[str]] = {name[: -len(_HEADER)]: set() for name in headers}
    for name in archive.sizes:
        if _CHUNK.search(name) and (parent := _CHUNK.sub("", name)) in found:
            found[parent].add(name)
    return {path[len(folder) :]: _array(archive, path, path[len(folder) :], files) for path, files in found.items()}


def other_zarr_keys(archive: Archive, folder: str) -> tuple[str, ...]:
    """List what is no array: objects, one file ``<key>/shard_<i>_<n>.pt`` each."""
    names = (name[len(folder) :] for name in archive.sizes if name.startswith(folder) and name.endswith(".pt"))
    return tuple(name.removesuffix(".pt") for name in names if "/" in name)


def _array(archive: Archive, path: str, key: str, found: Set[str]) -> ChunkedTensor:
    """Describe an array by its header; ``found`` are the files beside it that are called as chunks are."""
    where = f"{archive.path}: {path}"
    header = Fields(parse_json(archive.read_bytes(path + _HEADER), f"{where}{_HEADER}"), f"{where}{_HEADER}")
    shape, sizes = header.sizes("shape"), header.sizes("chunks")
    data_type, separator = header.text("dtype"), header.text("dimension_separator", ".")
    _check_header(where, header, shape, sizes)
    data_type = _DATA_TYPES.get(data_type, data_type)
    counts = [-(-full // size) for full, size in zip(shape, sizes, strict=True)]
    if prod(counts) > len(archive.sizes):
        raise CheckpointError(
            f"{where}{_HEADER}: {list(shape)} in chunks of {list(sizes)} are {prod(counts)} files, more than there are",
            "copy the checkpoint again",
        )
    chunks, surplus = [], set(found)
    for place in itertools.product(*map(range, counts)):
        name = f"{path}/{separator.join(map(str, place)) or '0'}"
        offsets = tuple(index * size for index, size in zip(place, sizes, strict=True))
        valid = tuple(min(size, full - offset) for size, full, offset in zip(sizes, shape, offsets, strict=True))
        if data_type in STORAGE:
            _check_size(archive, name, prod(sizes) * STORAGE[data_type].itemsize)
        surplus.discard(name)
        chunks.append(Chunk(offsets, valid, _reader(archive, name, data_type, sizes, valid), name))
    if surplus:
        raise CheckpointError(
            f"{where}{_HEADER}: {list(shape)} in chunks of {list(sizes)} has no place for {min(surplus)}",
            "copy the checkpoint again",
        )
    return ChunkedTensor(key, shape, data_type, tuple(chunks))


def _check_header(where: str, header: Fields, shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    if header.get("compressor") is not None or header.get("filters"):
        found = header.get("compressor") or header.get("filters")
        raise CheckpointError(
            f"{where}: its chunks are compressed ({shown(found.get('id') if isinstance(found, dict) else found)})",
            "megatron-core writes them plain; save it again with compressor=None",
        )
    # Its chunks are what a training rank held: never more than there is.
    pairs = zip(sizes, shape, strict=False)
    is_grid = len(shape) == len(sizes) and all(0 < size <= max(1, full) for size, full in pairs)
    if (
        header.get("zarr_format") != 2
        or header.get("order", "C") != "C"
        or not is_grid
        or header.text("dimension_separator", ".") not in _SEPARATORS
    ):
        raise CheckpointError(f"{where}{_HEADER}: not an array that megatron-core writes (zarr 2, order C)")


def _check_size(archive: Archive, name: str, wanted_bytes: int) -> None:
    """Every chunk is there, and as long as the header says; the last one of an axis is padded."""
    if archive.sizes.get(name) != wanted_bytes:
        archive.refuse_pointers({name} & archive.sizes.keys())
        found = f"has {archive.sizes[name]} bytes instead of {wanted_bytes}" if name in archive else "is missing"
        raise CheckpointError(f"{archive.path}: chunk {name} {found}", "copy the checkpoint again")


def _reader(archive: Archive, name: str, data_type: str, sizes: tuple[int, ...], valid: tuple[int, ...]) -> Any:
    def read() -> Array:
        extent = archive.extent(name)
        values = map_record(extent.path, extent.offset, extent.size_bytes).view(STORAGE[data_type]).reshape(sizes)
        return values[tuple(slice(n) for n in valid)]

    return read
