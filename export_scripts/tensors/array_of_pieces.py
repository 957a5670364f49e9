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


def pieces_in_order(view: Array) -> list[Array] | None:
    """Return parts of pieces whose elements, one after another, are those of a view; None: they are not."""
    whole = pieces_beneath(view)
    if whole is None or not view.size or not view.flags.c_contiguous:
        return None
    box, found, end = box_around(whole, view), list[Array](), 0
    if prod(box.shape) != view.size:
        return None
    steps = _steps(box.shape)
    for place, piece in sorted(box.pieces(), key=lambda each: [axis.start for axis in each[0]]):
        inner = sum(size > 1 for size in piece.shape) and next(n for n, size in enumerate(piece.shape) if size > 1) + 1
        is_run = piece.shape[inner:] == box.shape[inner:] and isinstance(piece, np.ndarray) and piece.flags.c_contiguous
        if not is_run or sum(axis.start * step for axis, step in zip(place, steps, strict=True)) != end:
            return None
        found.append(piece)  # type: ignore[arg-type]
        end += piece.size  # type: ignore[union-attr]
    return found


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
    address = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    return tuple(int(n) for n in np.unravel_index(address // whole.itemsize, whole.shape))


def _slices(begin: Any, end: Any) -> tuple[slice, ...]:
    return tuple(slice(int(a), int(b)) for a, b in zip(begin, end, strict=True))
