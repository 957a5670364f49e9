"""The three data types of shards, as numpy stores them, and the casts between them.

numpy has no bfloat16, so a bf16 array is held as its bit patterns in uint16. Every cast is checked:
a value that is not finite in the target type raises, because FasterTransformer would serve it as noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from handover.errors import CheckpointError

Array = npt.NDArray[Any]

STORAGE: dict[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "bf16": np.dtype("<u2")}
_LARGEST = {"fp32": 3.4028235e38, "fp16": 65504.0, "bf16": 3.3895314e38}
_EXPONENT_BITS = {"fp16": 0x7C00, "bf16": 0x7F80}


def item_bytes(data_type: str) -> int:
    """Return the bytes of one element of fp32, fp16 or bf16."""
    return STORAGE[data_type].itemsize


def cast(values: Array, source: str, target: str, name: str) -> Array:
    """Cast between fp32, fp16 and bf16, rounding to nearest even as IEEE 754 and torch do.

    Args:
        values: any shape, in the storage type of ``source``.
        source: fp32, fp16 or bf16.
        target: fp32, fp16 or bf16.
        name: of the tensor, for the error.

    Raises:
        CheckpointError: a value is NaN or infinite, or becomes infinite in the target type.
    """
    result = values if source == target else _narrow(widen(values, source), target)
    if not _is_finite(result, target):
        raise _not_finite(widen(values, source), target, name)
    return result


def widen(values: Array, source: str) -> Array:
    """Give fp32, fp16 or bf16 values in fp32, which holds all of them exactly."""
    if source == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def _narrow(values: Array, target: str) -> Array:
    if target == "bf16":
        bits = values.view(np.uint32)
        # Half of the unit that is cut off, less one where the kept part is even: ties go to even.
        return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype(STORAGE[target], copy=False)


def _is_finite(values: Array, data_type: str) -> bool:
    if data_type == "fp32" or not values.size:
        return bool(np.isfinite(values).all())
    # An all-ones exponent is NaN or infinity; comparing bits is five times faster than numpy's isfinite on halves.
    return int((values.view(np.uint16) & 0x7FFF).max()) < _EXPONENT_BITS[data_type]


def _not_finite(wide: Array, target: str, name: str) -> CheckpointError:
    finite = np.isfinite(wide)
    if not finite.all():
        return CheckpointError(
            f"{name} holds {int((~finite).sum())} values that are NaN or infinite", "the checkpoint itself is damaged"
        )
    return CheckpointError(
        f"{name} overflows {target}: its largest magnitude is {float(np.abs(wide).max()):.4g}, "
        f"{target} ends at {_LARGEST[target]:.4g}",
        "convert with weight_data_type=bf16 or fp32",
    )
