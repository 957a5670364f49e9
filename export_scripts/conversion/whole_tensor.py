"""Read a whole tensor into memory: factors of a product, and what else is small or needed at once."""

from __future__ import annotations

import numpy as np

from export_scripts.conversion.dtypes import Array, widen
from export_scripts.conversion.mapped import Reader
from export_scripts.weights.schema import LazyTensor


def read_whole(tensor: LazyTensor) -> Array:
    """Read a tensor in fp32, its parts joined and its checksums compared.

    Raises:
        CheckpointError: it cannot be read or is damaged.
    """
    reader = Reader(0, set())
    parts = tensor.parts()
    values = [widen(reader.read(part), tensor.data_type) for part in parts]
    for part in parts:
        reader.verify(part)
    return values[0] if tensor.axis is None else np.concatenate(values, tensor.axis)
