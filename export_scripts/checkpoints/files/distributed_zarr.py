"""Distributed checkpoints in zarr's format, version 2: a folder for each array, a file for each chunk, mapped in place.

Format: zarr's specification, version 2; megatron-core, ``dist_checkpointing/strategies/zarr.py`` (a key is a folder,
``bfloat16`` stands for a type that numpy lacks).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from math import prod
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import is_shape, parse_json
from export_scripts.checkpoints.files.chunked import Chunk, ChunkedTensor
from export_scripts.dtypes import STORAGE, Array
from export_scripts.mapped import map_record
from handover.errors import CheckpointError

_HEADER = "/.zarray"
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
    keys = [name[len(folder) : -len(_HEADER)] for name in headers]
    return {key: _array(archive, folder + key, key) for key in keys}


def other_zarr_keys(archive: Archive, folder: str) -> tuple[str, ...]:
    """List what is no array: objects, one file ``<key>/shard_<i>_<n>.pt`` each."""
    names = (name[len(folder) :] for name in archive.sizes if name.startswith(folder) and name.endswith(".pt"))
    return tuple(name.removesuffix(".pt") for name in names if "/" in name)


def _array(archive: Archive, path: str, key: str) -> ChunkedTensor:
    where = f"{archive.path}: {path}"
    header = parse_json(archive.read_bytes(path + _HEADER), f"{where}{_HEADER}")
    try:
        shape, sizes = tuple(int(n) for n in header["shape"]), tuple(int(n) for n in header["chunks"])
        data_type, separator = str(header["dtype"]), header.get("dimension_separator", ".")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{where}{_HEADER} is damaged ({error})", "copy the checkpoint again") from error
    _check_header(where, header, shape, sizes)
    data_type = _DATA_TYPES.get(data_type, data_type)
    counts = [-(-full // size) for full, size in zip(shape, sizes, strict=True)]
    if prod(counts) > len(archive.sizes):
        raise CheckpointError(
            f"{where}{_HEADER}: {list(shape)} in chunks of {list(sizes)} are {prod(counts)} files, more than there are",
            "copy the checkpoint again",
        )
    chunks = []
    for place in itertools.product(*map(range, counts)):
        name = f"{path}/{separator.join(map(str, place)) or '0'}"
        offsets = tuple(index * size for index, size in zip(place, sizes, strict=True))
        valid = tuple(min(size, full - offset) for size, full, offset in zip(sizes, shape, offsets, strict=True))
        if data_type in STORAGE:
            _check_size(archive, name, prod(sizes) * STORAGE[data_type].itemsize)
        chunks.append(Chunk(offsets, valid, _reader(archive, name, data_type, sizes, valid)))
    return ChunkedTensor(key, shape, data_type, tuple(chunks))


def _check_header(where: str, header: Mapping[str, Any], shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    if header.get("compressor") is not None or header.get("filters"):
        compressor = (header.get("compressor") or {}).get("id", "a filter")
        raise CheckpointError(
            f"{where}: its chunks are compressed ({compressor})",
            "megatron-core writes them plain; save it again with compressor=None",
        )
    is_grid = is_shape(shape) and is_shape(sizes) and len(shape) == len(sizes) and 0 not in sizes
    if header.get("zarr_format") != 2 or header.get("order", "C") != "C" or not is_grid:
        raise CheckpointError(f"{where}{_HEADER}: not an array that megatron-core writes (zarr 2, order C)")


def _check_size(archive: Archive, name: str, wanted_bytes: int) -> None:
    """Every chunk is there, and as long as the header says; the last one of an axis is padded."""
    if archive.sizes.get(name) != wanted_bytes:
        found = f"has {archive.sizes[name]} bytes instead of {wanted_bytes}" if name in archive else "is missing"
        raise CheckpointError(f"{archive.path}: chunk {name} {found}", "copy the checkpoint again")


def _reader(archive: Archive, name: str, data_type: str, sizes: tuple[int, ...], valid: tuple[int, ...]) -> Any:
    def read() -> Array:
        extent = archive.extent(name)
        values = map_record(extent.path, extent.offset, extent.size_bytes).view(STORAGE[data_type]).reshape(sizes)
        return values[tuple(slice(n) for n in valid)]

    return read
