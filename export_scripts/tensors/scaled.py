"""Numbers of 8 or 4 bits of which each block has a scale: multiplied where they are read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from export_scripts.tensors.computed import Computed, Index
from export_scripts.tensors.dtypes import Array, recast, widen
from export_scripts.tensors.small_floats import FP4, TABLES, decode


@dataclass(frozen=True)
class Scaled(Computed):
    """Numbers times their block's scale, in fp32; blocks lie in the last two axes, the last may be cut off.

    Attributes:
        base: [..., rows, bytes], as bytes.
        kind: of the numbers, see ``small_floats``.
        scales: [..., blocks of rows, blocks of columns].
        scale_type: fp32, fp16, bf16 or E8M0.
        block: rows and columns of one.
        shape: [..., rows, columns].
        offset: row and column in its block of the first number.
    """

    base: Array
    kind: str
    scales: Array
    scale_type: str
    block: tuple[int, int]
    shape: tuple[int, ...]
    offset: tuple[int, int] = (0, 0)

    @property
    def beside(self) -> tuple[Array, ...]:  # type: ignore[override]
        """The scales."""
        return (self.scales,)

    @property
    def result_type(self) -> str:  # type: ignore[override]
        """fp32; bf16 where it holds every product: FP4 has two digits, and its scales are powers of two."""
        return "bf16" if self.kind == FP4 else "fp32"

    def __getitem__(self, index: Index) -> Scaled:
        """Cut out a range of the first axes; nothing is computed."""
        whole = index + (slice(None),) * (len(self.shape) - len(index))
        ranges = [range(size)[one] for one, size in zip(whole, self.shape, strict=True)]
        *lead, rows, columns = (slice(each.start, each.stop) for each in ranges)
        places = [(first + each.start, first + each.stop) for first, each in zip(self.offset, ranges[-2:], strict=True)]
        blocks = [_covering(*place, size) for place, size in zip(places, self.block, strict=True)]
        columns = _covering(self._skipped + columns.start, self._skipped + columns.stop, self._in_a_byte)
        of_bytes, of_scales = (*lead, rows, columns), (*lead, *blocks)
        return replace(
            self,
            base=self.base[of_bytes],
            scales=self.scales[of_scales],
            shape=tuple(map(len, ranges)),
            offset=(places[0][0] % self.block[0], places[1][0] % self.block[1]),
        )

    def values(self, base: Array, *beside: Array) -> Array:
        """Multiply the numbers that bytes mean by their scales."""
        (scales,) = beside
        wide = widen(scales, self.scale_type) if self.scale_type not in TABLES else decode(scales, self.scale_type)
        for axis in (-2, -1):
            if wide.shape[axis] > 1:
                places = (self.offset[axis] + np.arange(self.shape[axis])) // self.block[axis]
                wide = np.repeat(wide, np.bincount(places), axis)
        numbers = decode(base, self.kind)[..., self._skipped : self._skipped + self.shape[-1]]
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found where it is written
            return recast(numbers * wide, "fp32", self.result_type)

    @property
    def _in_a_byte(self) -> int:
        return TABLES[self.kind].itemsize // np.dtype(np.float32).itemsize

    @property
    def _skipped(self) -> int:
        """Numbers of the first byte that come before the first column."""
        return self.offset[1] % self._in_a_byte


def _covering(start: int, stop: int, size: int) -> slice:
    """Find the blocks of a size that hold a range."""
    return slice(start // size, -(-stop // size))
