"""Copy what is only copied: bytes that stay as they are go from the source to the target in runs that fit the cache.

A run is read, checked and summed up while it lies in the second-level cache, and no array is made of it. Boxes that are
cast, rearranged or computed take the way of ``shards.blocks``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from export_scripts.conversion.move.assembly import Assembly, Piece
from export_scripts.conversion.write.shards import READ_BYTES, ShardSettings, Workspace, blocks, nonfinite_error
from export_scripts.tensors.array_of_pieces import columns_in_order, outer_axes, runs_in_order, side_by_side
from export_scripts.tensors.dtypes import STORAGE, Array, is_finite
from export_scripts.tensors.mapped import RUN_BYTES, is_mapped
from export_scripts.tensors.small_floats import check_finite

_LEAST_BYTES = 64 << 10
"""A view whose bytes lie in runs shorter than that is not copied run by run."""


def contents(box: Assembly, name: str, settings: ShardSettings, workspace: Workspace) -> Iterator[memoryview]:
    """Yield the bytes of a box in row-major order, cast and checked; each content is valid until the next is asked for.

    Args:
        box: of a target.
        name: of the target.
        settings: the data type, and whether what is not finite may be written.
        workspace: of this process.

    Raises:
        CheckpointError: a value is NaN, infinite or too large for the data type, or the source cannot be read.
    """
    runs = _runs(box, settings.data_type, workspace)
    if runs is None:
        for part, axis in _in_parts(box):
            for _, values in blocks(part, max(1, part.shape[axis]), name, settings, workspace, axis=axis):
                yield values.reshape(-1).view("u1").data
        return
    storage = STORAGE.get(settings.data_type)
    for run in runs:
        if storage is None:
            check_finite(run, settings.data_type, name)
        # What is not finite and may be so cannot overflow: it keeps its type.
        elif not settings.allow_nonfinite and not is_finite(run.view(storage), settings.data_type):
            raise nonfinite_error(box, max(1, len(run) // max(1, box.row_bytes)), name, settings, workspace)
        yield run.data


def _in_parts(box: Assembly) -> Iterator[tuple[Assembly, int]]:
    """Yield a box and the axis of its rows; where a row is a matrix of tens of MB, each with its own rows."""
    if len(box.shape) < 3 or box.row_bytes <= READ_BYTES // 2:
        yield box, 0
        return
    for row in range(box.shape[0]):
        yield box.cropped(0, row, row + 1), 1


def _runs(box: Assembly, data_type: str, workspace: Workspace) -> Iterator[Array] | None:
    """Read the bytes of a box in row-major order, a little at a time; None: it is more than a copy of them."""
    is_cast = any(piece.data_type != data_type for piece in box.pieces())
    if len(box.terms) != 1 or box.elementwise or is_cast:
        return None
    pieces = sorted(box.terms[0], key=lambda piece: piece.start)
    if (views := _views_in_order(box, pieces)) is not None:
        return (run for view in views for run in workspace.reader.runs(view))
    columns = _columns_in_order(box, pieces)
    return _side_by_side(columns, workspace) if columns else None


def _views_in_order(box: Assembly, pieces: Sequence[Piece]) -> list[Array] | None:
    """Return the views whose bytes, one after another, are those of a box; None: there are none so long."""
    row, views = 0, list[Array]()
    for piece in pieces:
        is_in_place = piece.start == (row, *(0,) * (len(box.shape) - 1)) and piece.view.shape[1:] == box.shape[1:]
        found = _runs_of(piece.view) if is_in_place else None
        if found is None:
            return None
        views += found
        row += piece.view.shape[0]
    return views if row == box.shape[0] and all(map(_is_run, views)) else None


def _runs_of(view: Array) -> list[Array] | None:
    """Take a view apart into those whose bytes lie together; None: they are too many."""
    if not is_mapped(view):
        return runs_in_order(view, _LEAST_BYTES)
    outer = outer_axes(view)
    if outer and prod(view.shape[outer:]) * view.itemsize < _LEAST_BYTES:
        return None
    return [view[index] for index in np.ndindex(view.shape[:outer])]


def _columns_in_order(box: Assembly, pieces: Sequence[Piece]) -> list[Array] | None:
    """Return matrices that are a box if they stand side by side, as ranks have them; None: it is otherwise."""
    columns = side_by_side(box.shape, box.shape[0], [(piece.start, piece.view) for piece in pieces])
    if len(pieces) == 1 and pieces[0].view.shape == box.shape:
        columns = columns_in_order(pieces[0].view)
    is_narrow = columns and sum(each.shape[1] * each.itemsize for each in columns) <= RUN_BYTES
    return columns if columns and is_narrow and all(map(_is_run, columns)) else None


def _side_by_side(columns: Sequence[Array], workspace: Workspace) -> Iterator[Array]:
    """Read some rows of each matrix at a time, and put them together."""
    width, rows, dtype = sum(each.shape[1] for each in columns), columns[0].shape[0], columns[0].dtype
    most = RUN_BYTES // (width * dtype.itemsize)
    for start in range(0, rows, most):
        workspace.reader.forget()
        count, begin = min(most, rows - start), 0
        target = workspace.block[: count * width * dtype.itemsize].view(dtype).reshape(count, width)
        for each in columns:
            target[:, begin : begin + each.shape[1]] = workspace.reader.read(each[start : start + count])
            begin += each.shape[1]
        yield target.reshape(-1).view(np.uint8)


def _is_run(view: Array) -> bool:
    """Whether the bytes of a view lie together in a file."""
    return is_mapped(view) and view.flags.c_contiguous
