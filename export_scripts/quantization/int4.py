"""Whole numbers of 4 bits with a scale for each 128 of a row: compressed-tensors' ``pack-quantized``, without zeros.

Eight numbers, 8 added to each, are an int32, the first in its lowest bits. Nothing is calibrated: each weight becomes
the nearest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from export_scripts.quantization.compressed import quantization_config, scales
from export_scripts.quantization.groups import INT4, encode, peaks
from export_scripts.quantization.record import WORDS, Encoded, Output, Quantization, Shape
from export_scripts.tensors.dtypes import Array, item_bytes, widen

_GROUP, _IN_A_WORD = 128, 8
_NUMBERS = 15  # from the least to the largest


class Int4(Quantization):
    """Round to nearest, symmetric, in groups of 128."""

    name = "int4"
    grain = (1, _GROUP)

    def outputs(self, name: str, shape: Shape, data_type: str) -> tuple[Output, ...]:
        rows, columns = shape
        return (
            Output(f"{name}_packed", "I32", (rows, columns // _IN_A_WORD), 4),
            Output(f"{name}_scale", WORDS[data_type], (rows, columns // _GROUP), item_bytes(data_type)),
            Output(f"{name}_shape", "I64", (2,), 8, content=np.array(shape, "<i8").tobytes()),
        )

    def encode(self, values: Array, data_type: str) -> Encoded:
        rows, grouped = len(values), values.reshape(-1, _GROUP)
        # Half of all the numbers that four bits have, though the type has one more below zero than above.
        stored = scales(peaks(grouped, data_type), _NUMBERS / 2, data_type)
        codes, *sums = encode(grouped, data_type, INT4, widen(stored, data_type))
        return Encoded(
            (codes.reshape(rows, -1), stored.reshape(rows, -1)), *(each.reshape(rows, -1).sum(1) for each in sums)
        )

    def config(self, stays: Sequence[str]) -> dict[str, Any]:
        weights = {
            **{"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP},
            "dynamic": False,
        }
        return quantization_config("pack-quantized", weights, None, stays)

    def problem(self, shape: Shape) -> str:
        return "" if shape[1] % _GROUP == 0 else f"its rows of {shape[1]} numbers are no groups of {_GROUP}"
