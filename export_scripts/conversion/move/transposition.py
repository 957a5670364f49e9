"""Copy strided views into row-major order at the speed of the cache.

numpy's own loop over a transposed matrix mostly reads elements that lie a power of two apart: they compete for the
same few lines of the cache, and each line is fetched again for every element of it. Here a tile is first copied to rows
that lie a little farther apart, and is turned from there, while it is in the second-level cache.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from export_scripts.tensors.dtypes import Array

Convert = Callable[[Array], Array]

# The largest tile: source rows and bytes of a row, and what a staged row is longer by: a line of the cache.
_TILE_ROWS, _TILE_ROW_BYTES, _GAP_BYTES = 512, 1024, 64


class Transposer:
    """Copies views. One for each thread: it keeps the memory of a tile."""

    def __init__(self) -> None:
        self._staged = np.empty(_TILE_ROWS * (_TILE_ROW_BYTES + _GAP_BYTES), np.uint8)

    def copy(self, target: Array, source: Array, convert: Convert | None = None) -> None:
        """Copy a view.

        Args:
            target: of the source's shape; its last axis is contiguous.
            source: any strides.
            convert: casts a tile of the source to the target's type; None: they are equal.
        """
        unit = _unit_axis(source)
        if unit == source.ndim - 1 or not source.size:
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
        groups, rows, columns = source.shape
        width = columns + _GAP_BYTES // source.itemsize
        staged = self._staged[: groups * rows * width * source.itemsize].view(source.dtype)
        staged = staged.reshape(groups, rows, width)[..., :columns]
        staged[...] = source
        target[...] = staged.transpose(2, 0, 1)


def _unit_axis(view: Array) -> int:
    """Return the axis along which neighbours lie closest together."""
    axes = [axis for axis in range(view.ndim) if view.shape[axis] > 1] or [view.ndim - 1]
    return min(reversed(axes), key=lambda axis: abs(view.strides[axis]))
