"""A matrix plus a product of two thin ones: a LoRA that is merged where it is read."""

from __future__ import annotations

from dataclasses import dataclass

from export_scripts.tensors.computed import Computed, Index
from export_scripts.tensors.dtypes import Array, widen


@dataclass(frozen=True)
class LowRankSum(Computed):
    """``base + left @ right`` in fp32.

    Attributes:
        base: [rows, columns].
        data_type: fp32, fp16 or bf16, of ``base``.
        left: [rows, rank], fp32, in memory.
        right: [rank, columns], fp32, in memory.
    """

    base: Array
    data_type: str
    left: Array
    right: Array
    result_type = "fp32"

    @property
    def shape(self) -> tuple[int, int]:  # type: ignore[override]
        """Rows and columns."""
        return self.left.shape[0], self.right.shape[1]

    def __getitem__(self, index: Index) -> LowRankSum:
        """Cut out rows, or rows and columns; nothing is computed."""
        rows, columns = (*index, slice(None))[:2]
        return LowRankSum(self.base[rows, columns], self.data_type, self.left[rows], self.right[:, columns])

    def values(self, base: Array, *beside: Array) -> Array:
        """Compute the sum, given the values of ``base``."""
        total: Array = self.left @ self.right
        total += widen(base, self.data_type)
        return total
