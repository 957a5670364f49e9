"""The three data types of shards, as numpy stores them, and the casts between them.

numpy has no bfloat16, so a bf16 array is held as its bit patterns in uint16. Every cast is checked:
a value that is not finite in the target type raises, because FasterTransformer would serve it as noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from handover.errors import CheckpointError

Array = npt.NDArray[Any]

STORAGE: dict[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "bf16": np.dtype("<u2")}
DIGITS = {"fp32": 24, "fp16": 11, "bf16": 8}
"""Binary digits of each type's numbers."""
_LARGEST = {"fp32": 3.4028235e38, "fp16": 65504.0, "bf16": 3.3895314e38}
# The bits of an exponent of ones alone, and the types in which bits are compared: with and without the sign as such.
_EXPONENTS = {
    "fp32": (0x7F800000, np.int32, np.uint32),
    "fp16": (0x7C00, np.int16, np.uint16),
    "bf16": (0x7F80, np.int16, np.uint16),
}
_SIGN = {"fp32": 1 << 31, "fp16": 1 << 15, "bf16": 1 << 15}


def item_bytes(data_type: str) -> int:
    """Return the bytes of one element of fp32, fp16 or bf16."""
    return STORAGE[data_type].itemsize


def recast(values: Array, source: str, target: str) -> Array:
    """Cast between fp32, fp16 and bf16, rounding to nearest even as IEEE 754 and torch do; nothing is checked.

    Args:
        values: any shape, in the storage type of ``source``.
        source: fp32, fp16 or bf16.
        target: fp32, fp16 or bf16.
    """
    return values if source == target else _narrow(widen(values, source), target)


def is_finite(values: Array, data_type: str) -> bool:
    """Whether no value is NaN or infinite: none has an exponent of ones alone, compared as whole numbers."""
    if not values.size:
        return True
    limit, signed, unsigned = _EXPONENTS[data_type]
    return int(values.view(signed).max()) < limit and int(values.view(unsigned).max()) < limit + _SIGN[data_type]


def widen(values: Array, source: str) -> Array:
    """Return fp32, fp16 or bf16 values in fp32, which holds all of them exactly."""
    if source == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _narrow(values: Array, target: str) -> Array:
    if target != "bf16":
        with np.errstate(over="ignore"):
            return values.astype(STORAGE[target], copy=False)
    bits = values.view(np.uint32)
    # Half of the unit that is cut off, less one where the kept part is even: ties go to even.
    rounded = bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if is_nan.any():  # rounding may carry out of the largest ones into a number
        rounded[is_nan] = np.uint32(0x7FC00000)
    return (rounded >> 16).astype(np.uint16)


@dataclass
class Census:
    """A count of what a cast cannot bring over.

    Attributes:
        not_finite: values that are NaN or infinite before the cast.
        first_at: place of the first of them.
        largest: magnitude of those that are finite.
        largest_at: its place.
    """

    not_finite: int = 0
    first_at: list[int] | None = None
    largest: float = 0.0
    largest_at: list[int] | None = None

    def add(self, wide: Array, origin: Sequence[int]) -> None:
        """Count values, given in fp32; the first one lies at ``origin`` of the tensor."""

        def place(index: Any) -> list[int]:
            return [int(n) for n in np.add(origin, np.unravel_index(index, wide.shape))]

        finite = np.isfinite(wide)
        if not finite.all():
            self.not_finite += int((~finite).sum())
            self.first_at = self.first_at or place(finite.argmin())
        magnitudes = np.where(finite, np.abs(wide), 0)
        if magnitudes.size and (largest := float(magnitudes.max())) > self.largest:
            self.largest, self.largest_at = largest, place(magnitudes.argmax())

    def overflows(self, data_type: str) -> bool:
        """Whether a finite value becomes infinite."""
        with np.errstate(over="ignore"):
            return not is_finite(_narrow(np.array([self.largest], np.float32), data_type), data_type)

    def error(self, name: str, data_type: str) -> CheckpointError:
        """Return the error of a tensor."""
        if self.overflows(data_type):
            return CheckpointError(
                f"{name} overflows {data_type}: its largest magnitude is {self.largest:.4g}, "
                f"at {self.largest_at}, and {data_type} ends at {_LARGEST[data_type]:.4g}",
                "convert with weight_data_type=bf16 or fp32",
            )
        return CheckpointError(
            f"{name} holds {self.not_finite} values that are NaN or infinite, the first at {self.first_at}",
            "the checkpoint itself is damaged; export.model.allow_nonfinite=true converts it nevertheless",
        )
