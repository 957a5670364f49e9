"""What a table of a Hugging Face model is made of.

A table says for each tensor of the model which tensor of its family it is taken from: FasterTransformer's full, unsplit
tensors stand between all sources and all targets. It names axes and no sizes. Bytes in row-major order do not depend
on whether neighbouring axes are merged, so that a tensor is written by its family's axes, in another order, and only
its header has the merged shape; where a source had the same order, its views are contiguous again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from export_scripts.conversion.move.assembly import Assembly, Piece
from export_scripts.tensors.dtypes import STORAGE
from export_scripts.weights.layouts import less_one, plus_one
from export_scripts.weights.schema import Elementwise, Shape

_EXACT = (less_one, plus_one)
"""Functions that only change how a norm's weights are stored: what training computed is had exactly or refused."""


@dataclass(frozen=True)
class Taken:
    """One tensor of a Hugging Face model, and the family's tensor that it is taken from.

    Attributes:
        pivot: the family's name of that tensor.
        order: of its axes, inner structure spelled out, as ``numpy.transpose`` takes it; empty: as they are.
        merged: how many axes that follow one another then make each axis of the result; empty: one each.
        part: axis, start and stop of what is taken, of the axes before they are ordered; None: all of it.
        rows_before: rows of zeros that come before the first.
        is_zeros: all of it is zeros, in the shape that would be taken: the family has no such tensor.
        elementwise: a function of fp32 values, applied last.
        stays_fp32: it is of fp32 whatever the other weights are.
    """

    pivot: str
    order: tuple[int, ...] = ()
    merged: tuple[int, ...] = ()
    part: tuple[int, int, int] | None = None
    rows_before: int = 0
    is_zeros: bool = False
    elementwise: Elementwise | None = None
    stays_fp32: bool = False

    def axes(self, pivot_shape: Shape) -> Shape:
        """Work out the shape of what ``of`` gives: no axis is merged, those of one element are left out."""
        sizes = self._sizes(pivot_shape)
        if self.rows_before:
            return (sizes[0] + self.rows_before, *sizes[1:])
        return tuple(size for size in sizes if size != 1) or (1,)

    def _sizes(self, pivot_shape: Shape) -> list[int]:
        sizes = list(pivot_shape)
        if self.part:
            axis, start, stop = self.part
            sizes[axis] = stop - start
        return [sizes[axis] for axis in self.order or range(len(sizes))]

    def shape(self, pivot_shape: Shape) -> Shape:
        """Work out the shape of the result."""
        sizes, groups, first = self._sizes(pivot_shape), [], 0
        for count in self.merged or (1,) * len(sizes):
            groups.append(prod(sizes[first : first + count]))
            first += count
        assert first == len(sizes), f"{self.pivot}: merged {self.merged} of {sizes}"
        return (groups[0] + self.rows_before, *groups[1:])

    def of(self, pivot: Assembly) -> Assembly:
        """Take the tensor out of its family's; no byte moves."""
        if self.is_zeros:
            pivot = _zeros(pivot.shape)
        taken = pivot.cropped(*self.part) if self.part else pivot
        taken = _ordered(taken, self.order) if self.order else taken
        taken = _behind_zeros(taken, self.rows_before) if self.rows_before else _squeezed(taken)
        computed = _both(taken.elementwise, self.elementwise)
        return replace(taken, elementwise=computed, origin=(), is_exact=computed in _EXACT)


@dataclass(frozen=True)
class Facts:
    """What a model's dimensions do not say.

    Attributes:
        activation: the feed-forward's function in transformers' words, where the source knows more of it than the
            dimensions do; empty: they say all.
        is_head_tied: the output projection is the embedding, whether or not the family has a tensor for it.
        start_id, end_id: special ids, settled.
        pad_id: of the token that fills a batch up; None: not known.
    """

    activation: str = ""
    is_head_tied: bool = False
    start_id: int = 0
    end_id: int = 0
    pad_id: int | None = None


@dataclass(frozen=True)
class Target:
    """One architecture of transformers as a target.

    Attributes:
        model_type: transformers' name of it.
        architecture: the class that generates.
        tensors: lists every tensor by its name in a saved model.
        config: lists the keys of ``config.json`` that are this architecture's own.
        problems: says what it cannot express, ``field: value  (reason)`` a line each; empty: it can express the model.
        dropped: names tensors of the family that are not written, with the reason.
    """

    model_type: str
    architecture: str
    tensors: Callable[[Any, Facts], dict[str, Taken]]
    config: Callable[[Any, Facts], dict[str, Any]]
    problems: Callable[[Any, Facts], list[str]]
    dropped: Callable[[Any, Facts], Mapping[str, str]] = lambda dims, facts: {}


def in_every_layer(prefix: str, layer: Mapping[str, Taken], count: int) -> dict[str, Taken]:
    """Spell the tensors of all layers out.

    Args:
        prefix: of their names, with ``{layer}``.
        layer: the tensors of one, by what follows the prefix; each ``pivot`` follows ``model.layers.{layer}.``.
        count: of layers.
    """
    return {
        prefix.format(layer=index) + name: replace(taken, pivot=f"model.layers.{index}.{taken.pivot}")
        for index in range(count)
        for name, taken in layer.items()
    }


def unfinished(tensors: Mapping[str, Taken], dropped: Mapping[str, str], shapes: Mapping[str, Shape]) -> list[str]:
    """List what a table leaves of its family's tensors, or takes twice, one line each.

    Args:
        tensors: of the table.
        dropped: names of tensors that are left out on purpose.
        shapes: of the family's tensors, inner structure spelled out.
    """
    taken = dict.fromkeys(shapes, 0)
    problems = []
    for name, each in tensors.items():
        if each.pivot not in shapes:
            problems.append(f"{name}  is taken from {each.pivot}, which this model does not have")
            continue
        whole = shapes[each.pivot]
        if each.is_zeros:
            continue
        axis, start, stop = each.part or (0, 0, whole[0])
        taken[each.pivot] += prod(whole) // whole[axis] * (stop - start)
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
