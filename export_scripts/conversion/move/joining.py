"""Files that hold a rank's share of several tensors side by side, as those of query, key and value of a Llama do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from export_scripts.conversion.move.assembly import Assembly, Piece
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import Assignment
from ft_format.layout import TensorSpec, part_names, turned_axes


def join_files(assignments: Iterable[Assignment], files: Mapping[str, TensorSpec]) -> tuple[Assignment, ...]:
    """Put the tensors of one file together.

    Args:
        assignments: one for each whole tensor.
        files: every file by name, without ``.<rank>.bin``.

    Returns:
        One for each file, in the order of ``files``.
    """
    by_name = {each.name: each for each in assignments}
    return tuple(_of_file(name, target, by_name) for name, target in files.items())


def _of_file(name: str, target: TensorSpec, by_name: Mapping[str, Assignment]) -> Assignment:
    parts = tuple(_of_tensor(part, spec, by_name) for part, spec in part_names(name, target).items())
    if not target.parts:
        return parts[0]
    return Assignment(name, target, tuple(key for part in parts for key in part.keys), parts=parts)


def _of_tensor(name: str, target: TensorSpec, by_name: Mapping[str, Assignment]) -> Assignment:
    """Take a model's own tensor for the file, turned around if the file has it so."""
    own = by_name[target.origin or name]
    order = turned_axes(own.target.shape)
    if target.shape == own.target.shape or own.rule is None:
        return replace(own, name=name, target=target)
    rule = own.rule

    def turned(values: Array, dims: Any) -> Array:
        return rule.layout(values, dims).transpose(order)

    axis = None if rule.concat_axis is None else order.index(rule.concat_axis)
    return replace(own, name=name, target=target, rule=replace(rule, target=name, layout=turned, concat_axis=axis))


def side_by_side(boxes: Sequence[Assembly], axis: int) -> Assembly:
    """Put boxes of several tensors one behind another along an axis.

    Args:
        boxes: each of one term without a function of the values; a box may have several axes where the others have
            one, from ``axis`` to the last but one, and they become one.
        axis: along which they follow one another.
    """
    pieces: list[Piece] = []
    start = 0
    for box in boxes:
        assert len(box.terms) == 1 and not box.elementwise, "what lies side by side is neither added up nor computed"
        flat = _flattened(box, axis)
        pieces += [piece.moved(axis, start) for piece in flat.terms[0]]
        start += flat.shape[axis]
    shape = (*flat.shape[:axis], start, *flat.shape[axis + 1 :])
    return Assembly(shape, (tuple(pieces),), dims=boxes[0].dims)


def _flattened(box: Assembly, axis: int) -> Assembly:
    """Make one axis of those from ``axis`` to the last but one."""
    while len(box.shape) > axis + 2:
        inner = box.shape[axis + 1]
        pieces = tuple(flat for piece in box.terms[0] for flat in _merged(piece, axis, inner))
        box = replace(box, shape=(*box.shape[:axis], box.shape[axis] * inner, *box.shape[axis + 2 :]), terms=(pieces,))
    return box


def _merged(piece: Piece, axis: int, inner: int) -> Iterator[Piece]:
    """Make one axis of two; without copying, a piece may have to become several."""
    view, start = piece.view, piece.start
    outer_size, inner_size = view.shape[axis], view.shape[axis + 1]

    def placed(part: int) -> tuple[int, ...]:
        return (*start[:axis], (start[axis] + part) * inner + start[axis + 1], *start[axis + 2 :])

    if inner_size == inner and (inner == 1 or view.strides[axis] == inner * view.strides[axis + 1]):
        shape = (*view.shape[:axis], outer_size * inner, *view.shape[axis + 2 :])
        yield Piece(view.reshape(shape), piece.data_type, placed(0))
        return
    for part in range(outer_size):
        index: tuple[Any, ...] = (*(slice(None),) * axis, part)
        yield Piece(view[index], piece.data_type, placed(part))
