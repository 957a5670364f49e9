"""How the tensors of a Hugging Face model are taken out of its family's: no byte moves before they are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from export_scripts.conversion.move.assembly import Assembly, Piece
from export_scripts.tensors.dtypes import STORAGE
from export_scripts.weights.hub_tensor import HubTensor
from export_scripts.weights.layouts import less_one, plus_one
from export_scripts.weights.schema import Elementwise, Shape

_EXACT = (less_one, plus_one)
"""Functions that only change how a norm's weights are stored: what training computed is had exactly or refused."""


def taken(tensor: HubTensor, pivot: Assembly) -> Assembly:
    """Take a tensor out of its family's."""
    if tensor.is_zeros:
        pivot = _zeros(pivot.shape)
    made = pivot.cropped(*tensor.part) if tensor.part else pivot
    made = _ordered(made, tensor.order) if tensor.order else made
    made = _behind_zeros(made, tensor.rows_before) if tensor.rows_before else _squeezed(made)
    computed = _both(made.elementwise, tensor.elementwise)
    return replace(made, elementwise=computed, origin=(), is_exact=computed in _EXACT)


def unfinished(tensors: Mapping[str, HubTensor], dropped: Mapping[str, str], shapes: Mapping[str, Shape]) -> list[str]:
    """List what a table leaves of its family's tensors, or takes twice, one line each.

    Args:
        tensors: of the table.
        dropped: names of tensors that are left out on purpose.
        shapes: of the family's tensors, inner structure spelled out.
    """
    taken = dict.fromkeys(shapes, 0)
    problems = []
    for name, each in tensors.items():
        pivot = each.pivot or name
        if pivot not in shapes:
            problems.append(f"{name}  is taken from {pivot}, which this model does not have")
            continue
        whole = shapes[pivot]
        if each.is_zeros:
            continue
        axis, start, stop = each.part or (0, 0, whole[0])
        taken[pivot] += prod(whole) // whole[axis] * (stop - start)
    for pivot, shape in shapes.items():
        if pivot in dropped:
            continue
        if taken[pivot] != prod(shape):
            problems.append(f"{pivot}  {list(shape)}  has {prod(shape)} numbers, of which {taken[pivot]} are written")
    return problems


def _zeros(shape: Shape) -> Assembly:
    values = np.broadcast_to(np.zeros((), np.float32), shape)
    return Assembly(shape, ((Piece(values, "fp32", (0,) * len(shape)),),))


def _ordered(assembly: Assembly, order: Sequence[int]) -> Assembly:
    """Order the axes of a target and of its pieces."""

    def turned(piece: Piece) -> Piece:
        return replace(piece, view=piece.view.transpose(order), start=tuple(piece.start[axis] for axis in order))

    terms = tuple(tuple(turned(piece) for piece in term) for term in assembly.terms)
    return replace(assembly, shape=tuple(assembly.shape[axis] for axis in order), terms=terms)


def _squeezed(assembly: Assembly) -> Assembly:
    """Drop axes of one element, so that the first axis has rows to cut by."""
    kept = [axis for axis, size in enumerate(assembly.shape) if size != 1] or [len(assembly.shape) - 1]
    index = tuple(slice(None) if axis in kept else 0 for axis in range(len(assembly.shape)))

    def squeezed(piece: Piece) -> Piece:
        return replace(piece, view=piece.view[index], start=tuple(piece.start[axis] for axis in kept))

    terms = tuple(tuple(squeezed(piece) for piece in term) for term in assembly.terms)
    return replace(assembly, shape=tuple(assembly.shape[axis] for axis in kept), terms=terms)


def _behind_zeros(assembly: Assembly, rows: int) -> Assembly:
    """Put rows of zeros before a target's own."""
    shape = (rows, *assembly.shape[1:])

    def moved(term: tuple[Piece, ...]) -> tuple[Piece, ...]:
        data_type = term[0].data_type
        zeros = Piece(np.broadcast_to(np.zeros((), STORAGE[data_type]), shape), data_type, (0,) * len(shape))
        return (zeros, *(replace(piece, start=(piece.start[0] + rows, *piece.start[1:])) for piece in term))

    whole = (assembly.shape[0] + rows, *assembly.shape[1:])
    return replace(assembly, shape=whole, terms=tuple(moved(term) for term in assembly.terms))


def _both(first: Elementwise | None, then: Elementwise | None) -> Elementwise | None:
    if first is None or then is None:
        return first or then
    return lambda values, dims: then(first(values, dims), dims)
