"""An array whose pieces lie in many places, cut in any pattern: described as if it were in one.

Its memory is address space alone and is never touched. Views of every kind can be taken of it, as of a mapped file; a
reader finds out which box of the array a view needs, and reads that from the pieces.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from export_scripts.tensors.computed import Computed
from export_scripts.tensors.dtypes import Array

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


Take = Callable[[int], Array | Computed]
"""Returns a piece by its number."""


class ArrayOfPieces(np.ndarray[Any, Any]):
    """An array without values.

    Attributes:
        starts, ends: where the pieces that make it up lie, [piece, axis].
        take_piece: returns one of them; None: it is a view of an array that has pieces.
    """

    starts: Array
    ends: Array
    take_piece: Take | None = None


def array_of_pieces(
    shape: Sequence[int], dtype: np.dtype[Any], pieces: Sequence[tuple[tuple[int, ...], Array | Computed]]
) -> ArrayOfPieces:
    """Describe an array by its pieces, which cover it, and the place of each one's first element; nothing is read."""
    starts = np.array([start for start, _ in pieces], np.int64).reshape(len(pieces), len(shape))
    sizes = np.array([piece.shape for _, piece in pieces], np.int64).reshape(starts.shape)
    return array_of(shape, dtype, starts, sizes, lambda number: pieces[number][1])


def array_of(shape: Sequence[int], dtype: np.dtype[Any], starts: Array, sizes: Array, take: Take) -> ArrayOfPieces:
    """Describe an array by pieces that are taken where a reader comes to them.

    Args:
        shape: of the array.
        dtype: of its elements.
        starts: where the pieces lie, [piece, axis]; they cover the array.
        sizes: of them, [piece, axis].
        take: returns a piece by its number.
    """
    size_bytes = max(1, prod(shape) * dtype.itemsize)
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    array = ArrayOfPieces(tuple(shape), dtype, memory)
    array.starts, array.ends, array.take_piece = starts, starts + sizes, take
    return array


def pieces_beneath(view: Array) -> ArrayOfPieces | None:
    """Find the scattered array that a view is of; None: it is of none."""
    base: Any = view
    while base is not None and getattr(base, "take_piece", None) is None:
        base = getattr(base, "base", None)
    return base if isinstance(base, ArrayOfPieces) else None


@dataclass(frozen=True)
class Box:
    """A part of a scattered array that holds all that a view of it shows.

    Attributes:
        whole: the array.
        view: of it, with strides that are not negative.
        low, shape: the box's place and size, per axis.
    """

    whole: ArrayOfPieces
    view: Array
    low: tuple[int, ...]
    shape: tuple[int, ...]

    def pieces(self) -> Iterator[tuple[tuple[slice, ...], Array | Computed]]:
        """Yield each part of a piece that lies in the box, and its place in there."""
        assert self.whole.take_piece is not None, "pieces_beneath has found it"
        starts = self.whole.starts
        begins = np.maximum(starts, self.low)
        ends = np.minimum(self.whole.ends, np.add(self.low, self.shape))
        for number in np.flatnonzero((begins < ends).all(1)).tolist():
            start, begin, end = starts[number], begins[number], ends[number]
            within = _slices(begin - start, end - start)
            yield _slices(begin - self.low, end - self.low), self.whole.take_piece(number)[within]

    def shown(self, values: Array) -> Array:
        """Return what the view shows, of the box's values in row-major order."""
        own, steps = _steps(self.shape), _steps(self.whole.shape)
        start = sum((a - b) * step for a, b, step in zip(_start(self.whole, self.view), self.low, own, strict=True))
        strides = []
        for stride in self.view.strides:
            step = stride // self.whole.itemsize
            axis = _axis(steps, step)
            strides.append(step // steps[axis] * own[axis] * values.itemsize)
        return np.ndarray(self.view.shape, values.dtype, values.reshape(-1)[start:].data, strides=tuple(strides))


def box_around(whole: ArrayOfPieces, view: Array) -> Box:
    """Find a box that holds a view; the view's steps stay steps of one size within it."""
    steps, low = _steps(whole.shape), list(_start(whole, view))
    reach = [0] * whole.ndim
    for size, stride in zip(view.shape, view.strides, strict=True):
        step = stride // whole.itemsize
        axis = _axis(steps, step)
        if step % steps[axis]:
            return Box(whole, view, (0,) * whole.ndim, whole.shape)
        reach[axis] += (size - 1) * (step // steps[axis])
    for axis in range(whole.ndim - 1, 0, -1):
        rows = (low[axis] + reach[axis]) // whole.shape[axis]
        if rows:  # it goes on in the next row: all of each row is in the box
            low[axis], reach[axis] = 0, whole.shape[axis] - 1
            reach[axis - 1] += rows
    return Box(whole, view, tuple(low), tuple(more + 1 for more in reach))


def runs_in_order(view: Array, least_bytes: int) -> list[Array] | None:
    """Return flat parts of pieces whose elements, one after another, are those of a view.

    Returns:
        None where it is of no scattered array, its elements lie in shorter runs, or a piece's are not
        together in the array.
    """
    whole = pieces_beneath(view)
    if whole is None or not view.size:
        return None
    outer = outer_axes(view)
    if outer and prod(view.shape[outer:]) * view.itemsize < least_bytes:
        return None
    steps, sizes = np.array(_steps(whole.shape), np.int64), (whole.ends - whole.starts).prod(1)
    firsts = whole.starts @ steps
    order = np.argsort(firsts)
    firsts, are_runs = firsts[order], (((whole.ends - 1) @ steps + 1)[order] == firsts[order] + sizes[order])
    start, found = _place(whole, view), list[Array]()
    for index in np.ndindex(view.shape[:outer]):
        low = start + sum(place * step for place, step in zip(index, view.strides, strict=False)) // view.itemsize
        end = low + prod(view.shape[outer:])
        while low < end:
            number = int(np.searchsorted(firsts, low, "right")) - 1
            piece = whole.take_piece(int(order[number])) if whole.take_piece and are_runs[number] else None
            if not isinstance(piece, np.ndarray) or not piece.flags.c_contiguous:
                return None
            begin = low - int(firsts[number])
            found.append(piece.reshape(-1)[begin : begin + end - low])
            low += found[-1].size
            if not found[-1].size:
                return None
    return found


def outer_axes(view: Array) -> int:
    """Count the first axes along which a view has no step to the next byte: the others lie together."""
    return next(axes for axes in range(view.ndim + 1) if view[(slice(1),) * axes].flags.c_contiguous)


def columns_in_order(view: Array) -> list[Array] | None:
    """Return parts of pieces, [rows, columns], that are a view if they stand side by side; None: they are not."""
    whole = pieces_beneath(view)
    if whole is None or not view.size or not view.flags.c_contiguous:
        return None
    box = box_around(whole, view)
    placed = [(tuple(axis.start for axis in place), piece) for place, piece in box.pieces()]
    return side_by_side(box.shape, view.shape[0], placed) if prod(box.shape) == view.size else None


def side_by_side(
    shape: tuple[int, ...], rows: int, placed: Sequence[tuple[tuple[int, ...], Array | Computed]]
) -> list[Array] | None:
    """Return pieces as [rows, columns] if they make up an array by standing side by side; None: they do not.

    Args:
        shape: of the array.
        rows: of it as a matrix; its first axes are the rows, the others the columns.
        placed: each piece with the place of its first element.
    """
    outer = next((axes for axes in range(len(shape) + 1) if prod(shape[:axes]) == rows), None)
    if outer is None:
        return None
    found, end, steps = list[Array](), 0, _steps(shape)
    for start, piece in sorted(placed, key=lambda each: each[0]):
        inner = piece.shape[outer:]
        reach = sum((size - 1) * step for size, step in zip(inner, steps[outer:], strict=True)) + 1
        is_whole = piece.shape[:outer] == shape[:outer] and reach == prod(inner)
        if not is_whole or not isinstance(piece, np.ndarray) or not piece.flags.c_contiguous:
            return None
        if sum(place * step for place, step in zip(start, steps, strict=True)) != end:
            return None
        found.append(piece.reshape(rows, -1))
        end += prod(inner)
    return found if end * rows == prod(shape) else None


def parts_of(piece: Array | Computed, most_bytes: int) -> Iterator[tuple[slice, ...]]:
    """Divide a piece into runs of rows; where one row is larger than that, into runs of its own rows."""
    row_bytes, axis = piece.nbytes // piece.shape[0], 0
    while row_bytes > most_bytes and axis + 1 < len(piece.shape):
        axis += 1
        row_bytes //= piece.shape[axis]
    rows = max(1, most_bytes // row_bytes)
    for index in np.ndindex(*piece.shape[:axis]):
        for row in range(0, piece.shape[axis], rows):
            yield (*(slice(each, each + 1) for each in index), slice(row, row + rows))


def _steps(shape: Sequence[int]) -> list[int]:
    """Elements from one to the next along each axis, in row-major order."""
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _axis(steps: Sequence[int], step: int) -> int:
    """Find the axis along which a step leads; a step of 0 leads along the last."""
    return next((axis for axis, own in enumerate(steps) if own <= step), len(steps) - 1)


def _start(whole: Array, view: Array) -> tuple[int, ...]:
    return tuple(int(n) for n in np.unravel_index(_place(whole, view), whole.shape))


def _place(whole: Array, view: Array) -> int:
    """Elements from the start of an array to that of a view of it."""
    address: int = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return address // whole.itemsize


def _slices(begin: Any, end: Any) -> tuple[slice, ...]:
    return tuple(slice(int(a), int(b)) for a, b in zip(begin, end, strict=True))
