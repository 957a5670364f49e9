"""Copy what is only copied: bytes that stay as they are go from the source to the target in runs that fit the cache.

A run is read, checked and summed up while it lies in the second-level cache, and no array is made of it. Boxes that are
cast, rearranged or computed take the way of ``shards.blocks``.
"""

from __future__ import annotations

from collections.abc import Iterator

from export_scripts.conversion.move.assembly import Assembly
from export_scripts.conversion.write.shards import READ_BYTES, ShardSettings, Workspace, blocks, nonfinite_error
from export_scripts.tensors.array_of_pieces import pieces_in_order
from export_scripts.tensors.dtypes import STORAGE, Array, is_finite
from export_scripts.tensors.mapped import is_mapped
from export_scripts.tensors.small_floats import check_finite


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
    views = _views_in_order(box, settings.data_type)
    if views is None:
        for part, axis in _in_parts(box):
            for _, values in blocks(part, max(1, part.shape[axis]), name, settings, workspace, axis=axis):
                yield values.reshape(-1).view("u1").data
        return
    storage = STORAGE.get(settings.data_type)
    for view in views:
        for run in workspace.reader.runs(view):
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


def _views_in_order(box: Assembly, data_type: str) -> list[Array] | None:
    """Return the views whose bytes, one after another, are those of a box; None: it is more than a copy of them."""
    if len(box.terms) != 1 or box.elementwise:
        return None
    row, views = 0, list[Array]()
    for piece in sorted(box.terms[0], key=lambda piece: piece.start):
        is_in_place = piece.start == (row, *(0,) * (len(box.shape) - 1)) and piece.view.shape[1:] == box.shape[1:]
        if piece.data_type != data_type or not is_in_place:
            return None
        views += [piece.view] if is_mapped(piece.view) else pieces_in_order(piece.view) or [piece.view]
        row += piece.view.shape[0]
    return views if row == box.shape[0] and all(map(_is_run, views)) else None


def _is_run(view: Array) -> bool:
    """Whether the bytes of a view lie together in a file."""
    return is_mapped(view) and view.flags.c_contiguous
