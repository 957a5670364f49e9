"""A matrix plus a product of two thin ones, computed where it is read: the sum is never held whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from export_scripts.tensors.dtypes import Array, widen


@dataclass(frozen=True)
class LowRankSum:
    """``base + left @ right`` in fp32; it is cut as an array is, and a reader gives its values.

    Attributes:
        base: [rows, columns], mapped or scattered.
        data_type: fp32, fp16 or bf16, of ``base``.
        left: [rows, rank], fp32, in memory.
        right: [rank, columns], fp32, in memory.
    """

    base: Array
    data_type: str
    left: Array
    right: Array

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the sum."""
        return self.shape[0] * self.shape[1] * np.dtype(np.float32).itemsize

    def __len__(self) -> int:
        """Count the rows."""
        return self.shape[0]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> LowRankSum:
        """Cut out rows, or rows and columns; nothing is computed."""
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        return LowRankSum(self.base[rows, columns], self.data_type, self.left[rows], self.right[:, columns])

    def added_to(self, values: Array) -> Array:
        """Compute the sum, given the values of ``base``."""
        total: Array = self.left @ self.right
        total += widen(values, self.data_type)
        return total
