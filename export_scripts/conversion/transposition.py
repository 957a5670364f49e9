"""Copy strided views into row-major order at the speed of the cache.

numpy's own loop over a transposed matrix writes two bytes at a time, each into another line of the cache. Here elements
move in larger units, since numpy takes the same time for a small one as for a large one: two neighbours of 16 bits go
together as one of 32, and are parted at the end by casts, which are vectorised; and four rows of 32-bit elements are
first packed so that their elements of one column lie side by side, and then moved together as one element of 16 bytes.
All of it happens in tiles that stay in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from export_scripts.conversion.dtypes import Array

Convert = Callable[[Array], Array]

_WIDE = np.dtype(np.complex128)  # numpy's only plain element of 16 bytes; it is moved, never computed with
_WORD = np.dtype(np.uint32)
_PACKED = _WIDE.itemsize // _WORD.itemsize
# The largest tile: source rows and bytes of a row. A staged row is one element longer, so that rows do not lie a power
# of two apart and compete for the same lines of the cache.
_TILE_ROWS, _TILE_ROW_BYTES = 512, 1024


class Transposer:
    """Copies views. One for each thread: it keeps the memory of a tile."""

    def __init__(self) -> None:
        words = _TILE_ROW_BYTES // _WORD.itemsize
        self._staged = np.empty(_TILE_ROWS // _PACKED * (words + 1), _WIDE)
        self._turned = np.empty(_TILE_ROWS * words, _WORD)

    def copy(self, target: Array, source: Array, convert: Convert | None = None) -> None:
        """Copy a view.

        Args:
            target: of the source's shape; its last axis is contiguous.
            source: any strides.
            convert: casts a tile of the source to the target's type; None: they are equal.
        """
        unit = _unit_axis(source)
        if unit == source.ndim - 1 or source.size < _WIDE.itemsize:
            target[...] = convert(source) if convert else source
            return
        if not unit:
            self._turn(target, source, convert)
            return
        for index in np.ndindex(source.shape[:unit]):
            self._turn(target[index], source[index], convert)

    def _turn(self, target: Array, source: Array, convert: Convert | None) -> None:
        """Copy a view whose first axis is contiguous."""
        matrices = [(target, source)]
        for _ in range(source.ndim - 3):
            matrices = [pair for t, s in matrices for pair in zip(t.swapaxes(0, 1), s.swapaxes(0, 1), strict=True)]
        wide = _TILE_ROW_BYTES // target.itemsize
        for onto, whole in matrices:
            if whole.ndim == 2:
                onto, whole = onto[:, None], whole[:, None]
            columns, groups, rows = whole.shape
            depth = max(1, _TILE_ROWS // rows)
            for column in range(0, columns, wide):
                for group in range(0, groups, depth):
                    for row in range(0, rows, _TILE_ROWS):
                        tile = np.s_[column : column + wide, group : group + depth, row : row + _TILE_ROWS]
                        self._turn_tile(onto[tile], whole[tile].transpose(1, 2, 0), convert)

    def _turn_tile(self, target: Array, source: Array, convert: Convert | None) -> None:
        """Copy one tile: source [groups, rows, columns], target [columns, groups, rows]."""
        if convert:
            source = convert(source)
        if source.itemsize == _WORD.itemsize:
            self._turn_words(target.view(_WORD), source.view(_WORD))
            return
        if source.strides[-1] != source.itemsize:
            source = np.ascontiguousarray(source)
        groups, rows, columns = source.shape
        even = columns // 2 * 2
        halves = target.view(np.uint16)
        turned = self._turned[: groups * rows * even // 2].reshape(even // 2, groups, rows)
        self._turn_words(turned, source[..., :even].view(_WORD))
        np.copyto(halves[:even:2], turned, casting="unsafe")
        np.right_shift(turned, 16, out=turned)
        np.copyto(halves[1:even:2], turned, casting="unsafe")
        target[even:] = source[..., even:].transpose(2, 0, 1)

    def _turn_words(self, target: Array, source: Array) -> None:
        """Copy a tile of 32-bit elements: source [groups, rows, columns], target [columns, groups, rows]."""
        groups, rows, columns = source.shape
        whole = rows // _PACKED * _PACKED
        if whole:
            shape = (groups, rows // _PACKED, columns + 1)
            staged = self._staged[: shape[0] * shape[1] * shape[2]].reshape(shape)[..., :columns]
            narrow = staged.view(_WORD).reshape(*staged.shape, _PACKED)
            by_pack = source[:, :whole].reshape(groups, rows // _PACKED, _PACKED, columns)
            for row in range(_PACKED):
                narrow[..., row] = by_pack[:, :, row]
            target[..., :whole].view(_WIDE)[...] = staged.transpose(2, 0, 1)
        target[..., whole:] = source[:, whole:].transpose(2, 0, 1)


def _unit_axis(view: Array) -> int:
    """Return the axis along which neighbours lie closest together."""
    axes = [axis for axis in range(view.ndim) if view.shape[axis] > 1] or [view.ndim - 1]
    return min(reversed(axes), key=lambda axis: abs(view.strides[axis]))
