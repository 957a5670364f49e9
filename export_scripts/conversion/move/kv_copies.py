"""Heads of keys and values that several ranks have: with more ranks than such heads, each rank's file has a copy.

A model of 2 of them for 4 ranks is a model of 4, two and two of which are equal, and config.ini says so: kv_head_num 4,
kv_head_copies 2. So a loader needs to know of one head for each rank only. A group of query heads is then divided.
Between a source and the files the model is as it was: copies are made, and left out, here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from export_scripts.conversion.move.assembly import Assembly, Piece
from export_scripts.tensors.dtypes import Array
from ft_format.layout import KV_HEADS, QUERY_GROUP, Dims, TensorSpec, symbols_of

_Change = Callable[[Piece, int, int, int], Iterator[Piece]]
_Terms = tuple[tuple[Piece, ...], ...]


def with_copies(box: Assembly, target: TensorSpec, dims: Dims, tensor_para_size: int) -> Assembly:
    """Repeat each head of keys and values of a whole tensor where there are more ranks, and divide the query heads."""
    of_files = dims.for_ranks(tensor_para_size)
    if of_files == dims:
        return box
    return replace(box, terms=_changed(box.terms, target, dims, of_files, _copied), shape=target.full_shape(of_files))


def without_copies(terms: _Terms, target: TensorSpec, dims: Dims, tensor_para_size: int) -> _Terms:
    """Undo ``with_copies`` in what comes from the files of that many ranks: of equal heads the first one is taken."""
    of_files = dims.for_ranks(tensor_para_size)
    return terms if of_files == dims else _changed(terms, target, dims, of_files, _merged)


def _changed(
    terms: Iterable[tuple[Piece, ...]], target: TensorSpec, dims: Dims, of_files: Dims, change: _Change
) -> _Terms:
    symbols = symbols_of(target)
    if KV_HEADS not in symbols:
        return tuple(terms)
    axis, copies = symbols.index(KV_HEADS), of_files.axis_size(KV_HEADS) // dims.axis_size(KV_HEADS)
    is_query = symbols[axis + 1 : axis + 2] == (QUERY_GROUP,)
    group = of_files.axis_size(QUERY_GROUP) if is_query else 0
    return tuple(
        tuple(new for piece in term for head in _heads(piece, axis) for new in change(head, axis, group, copies))
        for term in terms
    )


def _heads(piece: Piece, axis: int) -> Iterator[Piece]:
    """Cut a piece into its heads along an axis."""
    for place in range(piece.view.shape[axis]):
        view = _cut(piece, axis, place, place + 1)
        yield replace(piece, view=view, start=_put(piece.start, axis, piece.start[axis] + place))


def _copied(piece: Piece, axis: int, group: int, copies: int) -> Iterator[Piece]:
    """Yield a head's copies; or the parts of a group of query heads, ``group`` of which are for each copy."""
    first = piece.start[axis] * copies
    for copy in range(copies):
        start = _put(piece.start, axis, first + copy)
        if not group:
            yield replace(piece, start=start)
            continue
        inner = piece.start[axis + 1]
        begin, end = max(inner, copy * group), min(inner + piece.view.shape[axis + 1], (copy + 1) * group)
        if begin < end:
            view = _cut(piece, axis + 1, begin - inner, end - inner)
            yield replace(piece, view=view, start=_put(start, axis + 1, begin - copy * group))


def _merged(piece: Piece, axis: int, group: int, copies: int) -> Iterator[Piece]:
    """Yield the first of a head's copies; or a part of a group of query heads its place in the whole group."""
    head, copy = divmod(piece.start[axis], copies)
    start = _put(piece.start, axis, head)
    if group:
        yield replace(piece, start=_put(start, axis + 1, copy * group + start[axis + 1]))
    elif copy == 0:
        yield replace(piece, start=start)


def _cut(piece: Piece, axis: int, start: int, stop: int) -> Array:
    place: tuple[slice, ...] = (*(slice(None),) * axis, slice(start, stop))
    return piece.view[place]


def _put(start: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*start[:axis], value, *start[axis + 1 :])
