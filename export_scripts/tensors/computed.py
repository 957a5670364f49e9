"""An array that is computed where it is read, out of a stored one and what lies beside it; it is never held whole."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

from export_scripts.tensors.dtypes import Array, item_bytes

Index = tuple[slice, ...]


class Computed(ABC):
    """An array that is cut as others are, and whose values a reader computes.

    Attributes:
        base: the stored one, mapped or scattered.
        beside: mapped arrays that the computation takes too, small against ``base``.
        shape: per axis.
        result_type: fp32, fp16 or bf16, of the values.
    """

    base: Array
    beside: tuple[Array, ...] = ()
    shape: tuple[int, ...]
    result_type: str

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return prod(self.shape) * item_bytes(self.result_type)

    @abstractmethod
    def __getitem__(self, index: Index) -> Computed:
        """Cut out a range of each of the first axes; nothing is computed."""

    @abstractmethod
    def values(self, base: Array, *beside: Array) -> Array:
        """Compute the values, given those of ``base`` and ``beside``."""
