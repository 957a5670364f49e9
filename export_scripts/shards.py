"""Write tensors as FasterTransformer's shards: split, cast, raw little-endian bytes, digested as they are written."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from export_scripts.dtypes import STORAGE, Array, cast, item_bytes
from export_scripts.journal import TEMPORARY_SUFFIX, Journal
from export_scripts.weights.schema import Assignment, LazyTensor, ModelDims, TargetTensor
from handover.errors import ArtefactError, CheckpointError
from handover.manifest import FileRecord
from handover.progress import human_bytes

# Enough to hide the cost of a call, little enough that several workers stay small.
_BLOCK_BYTES = 4 << 20
# A tile of a transposed tensor, staged in the second-level cache, and the elements that keep its rows apart.
_TILE_ROWS, _TILE_COLUMNS, _TILE_PADDING = 1024, 64, 32


@dataclass(frozen=True)
class ShardSettings:
    """How tensors become files.

    Attributes:
        tensor_para_size: ranks that a split tensor is cut for.
        data_type: fp32, fp16 or bf16, on disk.
        dims: of the model.
    """

    tensor_para_size: int
    data_type: str
    dims: ModelDims

    def shape(self, target: TargetTensor) -> tuple[int, ...]:
        """Shape of one file of a target."""
        return target.shard_shape(self.dims, self.tensor_para_size)

    def size_bytes(self, target: TargetTensor) -> int:
        """Bytes of one file of a target."""
        return prod(self.shape(target)) * item_bytes(self.data_type)

    def file_names(self, assignment: Assignment) -> tuple[str, ...]:
        """Files of a target, in the order of ranks."""
        if assignment.target.split_axis is None:
            return (f"{assignment.name}.bin",)
        return tuple(f"{assignment.name}.{rank}.bin" for rank in range(self.tensor_para_size))


def check_split(settings: ShardSettings) -> None:
    """Refuse a tensor_para_size that does not divide what it must.

    Raises:
        CheckpointError: it does not divide the heads or the feed-forward's width.
    """
    dims, ranks = settings.dims, settings.tensor_para_size
    if ranks < 1 or dims.head_num % ranks:
        legal = [str(n) for n in range(1, dims.head_num + 1) if dims.head_num % n == 0 and dims.inter_size % n == 0]
        raise CheckpointError(
            f"tensor_para_size {ranks} does not divide the model's {dims.head_num} heads", f"legal: {', '.join(legal)}"
        )
    if dims.inter_size % ranks:
        raise CheckpointError(f"tensor_para_size {ranks} does not divide the feed-forward's width {dims.inter_size}")


def check_values(name: str, source: LazyTensor, data_type: str) -> None:
    """Read a tensor and make sure that all of it is finite in another data type.

    Raises:
        CheckpointError: a value is NaN, infinite or too large for the data type.
    """
    values = source.read().ravel(order="K")
    for start in range(0, values.size, _BLOCK_BYTES // values.itemsize):
        cast(values[start : start + _BLOCK_BYTES // values.itemsize], source.data_type, data_type, name)


def check_space(directory: Path, needed_bytes: int) -> None:
    """Refuse to start what cannot end.

    Raises:
        ArtefactError: the file system has less room than is needed.
    """
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise ArtefactError(
            f"{directory} has {human_bytes(free_bytes)} free and {human_bytes(needed_bytes)} are needed",
            "free some space or choose another base_results_dir",
        )


@contextmanager
def full_disk_explained(path: Path) -> Iterator[None]:
    """Turn a full disk into one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ArtefactError(
            f"the disk is full: {path.name} could not be written to {path.parent}",
            "free some space; the next run continues where this one stopped",
        ) from error


def write_tensor(
    assignment: Assignment, source: LazyTensor | None, settings: ShardSettings, root: Path, journal: Journal
) -> list[FileRecord]:
    """Write the shards of one target that are not finished yet; returns the records of all of them.

    Raises:
        CheckpointError: a value is NaN, infinite or too large for the data type.
        ArtefactError: the disk is full.
    """
    names = settings.file_names(assignment)
    if all(name in journal.finished for name in names):
        return [journal.finished[name] for name in names]
    shape = settings.shape(assignment.target)
    views, data_type = _rank_views(assignment, source, settings, len(names))
    records = []
    for name, view in zip(names, views, strict=True):
        if name not in journal.finished:
            blocks = (cast(block, data_type, settings.data_type, assignment.name) for block in _blocks(view))
            records.append(_write(root / name, blocks, journal, shape, settings.data_type))
        else:
            records.append(journal.finished[name])
    return records


def write_bytes(path: Path, content: bytes, journal: Journal) -> FileRecord:
    """Write a small file as shards are written: digested, noted in the journal, all or nothing."""
    return _write(path, iter([np.frombuffer(content, np.uint8)]), journal)


def _rank_views(
    assignment: Assignment, source: LazyTensor | None, settings: ShardSettings, ranks: int
) -> tuple[Sequence[Array], str]:
    """Lay the source out and split it; nothing is copied but by the reader, to join training's shards."""
    if source is None or assignment.layout is None:
        zeros = np.zeros((), STORAGE[settings.data_type])
        return [np.broadcast_to(zeros, settings.shape(assignment.target))] * ranks, settings.data_type
    values = assignment.layout(source.read(), settings.dims)
    axis = assignment.target.split_axis
    return ([values] if axis is None else np.split(values, ranks, axis)), source.data_type


def _blocks(view: Array) -> Iterator[Array]:
    """Cut along the first axis into contiguous pieces of a few MB."""
    rows = max(1, _BLOCK_BYTES // max(1, view[:1].nbytes))
    for start in range(0, view.shape[0], rows):
        yield _gathered(view[start : start + rows])


def _gathered(view: Array) -> Array:
    """Copy a strided view into row-major order; a transposed one tile by tile, much faster than numpy's own loop."""
    if view.ndim < 2 or view.strides[-1] <= view.itemsize:
        return np.ascontiguousarray(view)
    result = np.empty(view.shape, view.dtype)
    for middle in np.ndindex(view.shape[1:-1]):
        matrix: tuple[Any, ...] = (slice(None), *middle)
        _copy_tiles(view[matrix], result[matrix])
    return result


def _copy_tiles(source: Array, target: Array) -> None:
    """Copy a matrix whose columns are contiguous into one whose rows are.

    Each tile goes through a buffer whose rows do not lie a power of two apart: with the weights' own strides all
    rows of a tile would compete for the same few lines of the cache.
    """
    buffer = np.empty((_TILE_COLUMNS, _TILE_ROWS + _TILE_PADDING), source.dtype)
    for row in range(0, source.shape[0], _TILE_ROWS):
        for column in range(0, source.shape[1], _TILE_COLUMNS):
            tile = (slice(row, row + _TILE_ROWS), slice(column, column + _TILE_COLUMNS))
            columns = source[tile].T
            staged = buffer[: columns.shape[0], : columns.shape[1]]
            staged[...] = columns
            target[tile] = staged.T


def _write(
    path: Path,
    blocks: Iterator[Array],
    journal: Journal,
    shape: tuple[int, ...] | None = None,
    data_type: str | None = None,
) -> FileRecord:
    """Write one file under a temporary name, note it in the journal, then give it its name."""
    temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    digest = hashlib.sha256()
    size_bytes = 0
    with full_disk_explained(path), temporary.open("wb", buffering=0) as stream:
        for block in blocks:
            content = block.reshape(-1).view(np.uint8).data
            digest.update(content)
            size_bytes += len(content)
            while content:
                content = content[stream.write(content) :]
        record = FileRecord(path.name, size_bytes, f"sha256:{digest.hexdigest()}", shape, data_type)
        journal.add(record)
        os.replace(temporary, path)
    return record
