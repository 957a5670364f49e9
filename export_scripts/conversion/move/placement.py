"""Where in a target each part of its sources belongs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from export_scripts.conversion.move.assembly import Assembly, Piece
from export_scripts.conversion.move.kv_copies import without_copies
from export_scripts.tensors.array_of_pieces import pieces_beneath
from export_scripts.tensors.dtypes import Array
from export_scripts.tensors.mapped import Reader
from export_scripts.weights.schema import Assignment, LazyTensor, Rule, laid_out_shape
from ft_format.layout import Dims


def assemble(assignment: Assignment, sources: Sequence[LazyTensor], dims: Dims) -> Assembly:
    """Find out where in a target each part of its sources belongs. Nothing is read."""
    shape, rule = assignment.target.full_shape(dims), assignment.rule
    origin = (0,) * len(shape)
    if rule is None:
        made = assignment.generate(dims) if assignment.generate else np.broadcast_to(np.float32(0), shape)
        return Assembly(shape, ((Piece(made, "fp32", origin),),))
    laid_out = [_pieces(rule, source, dims.for_ranks(rule.ranks), len(shape)) for source in sources]
    if rule.pair_axis is not None:
        pairs = zip(laid_out[::2], laid_out[1::2], strict=True)
        laid_out = [tuple(_one_after_another(pair, rule.pair_axis)) for pair in pairs]
    terms = tuple(laid_out)
    if rule.concat_axis is not None and len(sources) > 1:
        terms = (tuple(_one_after_another(laid_out, rule.concat_axis)),)
    terms = without_copies(terms, assignment.target, dims, rule.ranks)
    return Assembly(shape, terms, rule.elementwise, dims)


def _pieces(rule: Rule, source: LazyTensor, dims: Dims, axes: int) -> tuple[Piece, ...]:
    """Lay out each training rank's part; they follow one another along the axis in which the whole is longer."""
    views = [_laid_out(rule, part, dims) for part in source.parts()]
    axis = 0
    if len(views) > 1:
        whole = laid_out_shape(rule.layout, source.shape, dims)
        assert whole is not None, "match has compared the shapes"
        axis = next(i for i, (full, part) in enumerate(zip(whole, views[0].shape, strict=True)) if full != part)
    parts = [(Piece(view, source.data_type, (0,) * axes),) for view in views]
    return tuple(_one_after_another(parts, axis))


def _laid_out(rule: Rule, part: Array, dims: Dims) -> Array:
    """Lay out a part; one whose bytes lie in many places is read first where the layout is no view."""
    view = rule.layout(part, dims)
    if pieces_beneath(part) is None or pieces_beneath(view) is not None:
        return view
    reader = Reader(0, set())
    values = reader.read(part)
    reader.verify(part)
    return rule.layout(values, dims)


def _one_after_another(groups: Sequence[Sequence[Piece]], axis: int) -> Iterator[Piece]:
    """Move each group of pieces behind the group before, along an axis."""
    start = 0
    for group in groups:
        yield from (piece.moved(axis, start) for piece in group)
        start += max(piece.start[axis] + piece.view.shape[axis] for piece in group)
