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

from export_scripts.dtypes import Array, cast, item_bytes, widen
from export_scripts.journal import TEMPORARY_SUFFIX, Journal
from export_scripts.weights.schema import Assignment, Dims, LazyTensor, Rule, TargetTensor, laid_out_shape
from handover.errors import ArtefactError, CheckpointError
from handover.manifest import FileRecord
from handover.progress import human_bytes

# Enough to hide the cost of a call, little enough that several workers stay small.
_BLOCK_BYTES = 4 << 20
# A tile of a transposed tensor, staged in the second-level cache, and the elements that keep its rows apart.
_TILE_ROWS, _TILE_COLUMNS, _TILE_PADDING = 1024, 64, 32
_IN_WORDS = {"head_num": "the model's {} heads", "inter_size": "the feed-forward's width {}"}


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
    dims: Dims

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


def check_split(settings: ShardSettings, divided: Sequence[str]) -> None:
    """Refuse a tensor_para_size that does not divide what it must.

    Args:
        settings: of the conversion.
        divided: attributes of the dimensions that it must divide.

    Raises:
        CheckpointError: it does not divide the heads or the feed-forward's width.
    """
    ranks, sizes = settings.tensor_para_size, {name: settings.dims.axis_size(name) for name in divided}
    wrong = [
        _IN_WORDS.get(name, name + " {}").format(size) for name, size in sizes.items() if ranks < 1 or size % ranks
    ]
    if wrong:
        most = min(sizes.values())
        legal = [str(n) for n in range(1, most + 1) if all(size % n == 0 for size in sizes.values())]
        raise CheckpointError(
            f"tensor_para_size {ranks} does not divide {' and '.join(wrong)}", f"legal: {', '.join(legal)}"
        )


def check_values(assignment: Assignment, sources: Sequence[LazyTensor], settings: ShardSettings) -> None:
    """Read what a target is made from and make sure that all of it is finite in its data type.

    Raises:
        CheckpointError: a value is NaN, infinite or too large for the data type.
    """
    view, data_type = _laid_out(assignment, sources, settings)
    values = view.ravel(order="K")
    for start in range(0, values.size, _BLOCK_BYTES // values.itemsize):
        block = values[start : start + _BLOCK_BYTES // values.itemsize]
        cast(block, data_type, settings.data_type, assignment.name)


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
    assignment: Assignment, sources: Sequence[LazyTensor], settings: ShardSettings, root: Path, journal: Journal
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
    views, data_type = _rank_views(assignment, sources, settings, len(names))
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
    assignment: Assignment, sources: Sequence[LazyTensor], settings: ShardSettings, ranks: int
) -> tuple[Sequence[Array], str]:
    """Lay the sources out and split them by rank."""
    values, data_type = _laid_out(assignment, sources, settings)
    axis = assignment.target.split_axis
    return ([values] if axis is None else np.split(values, ranks, axis)), data_type


def _laid_out(assignment: Assignment, sources: Sequence[LazyTensor], settings: ShardSettings) -> tuple[Array, str]:
    """Give the whole target and its data type; one source in one part is not copied."""
    dims, rule = settings.dims, assignment.rule
    shape = assignment.target.full_shape(dims)
    if rule is None:
        made = assignment.generate(dims) if assignment.generate else np.broadcast_to(np.float32(0), shape)
        return made, "fp32"
    arrays = [_joined(rule, source, dims) for source in sources]
    data_types = {source.data_type for source in sources}
    if len(data_types) == 1 and not rule.elementwise and (len(arrays) == 1 or rule.concat_axis is not None):
        return _together(rule, arrays), data_types.pop()
    wide = _together(rule, [widen(array, source.data_type) for array, source in zip(arrays, sources, strict=True)])
    return (rule.elementwise(wide, dims) if rule.elementwise else wide), "fp32"


def _together(rule: Rule, arrays: Sequence[Array]) -> Array:
    if len(arrays) == 1:
        return arrays[0]
    return sum(arrays[1:], arrays[0]) if rule.concat_axis is None else np.concatenate(arrays, rule.concat_axis)


def _joined(rule: Rule, source: LazyTensor, dims: Dims) -> Array:
    """Lay out each training rank's part and join them along the axis in which the whole is longer."""
    laid_out = [rule.layout(part, dims) for part in source.parts()]
    if len(laid_out) == 1:
        return laid_out[0]
    whole = laid_out_shape(rule.layout, source.shape, dims)
    assert whole is not None, "match has compared the shapes"
    axis = next(i for i, (full, part) in enumerate(zip(whole, laid_out[0].shape, strict=True)) if full != part)
    return np.concatenate(laid_out, axis)


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
