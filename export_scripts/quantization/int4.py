"""Whole numbers of 4 bits with a scale for each 128 of a row: compressed-tensors' ``pack-quantized``, without zeros.

Eight numbers, 8 added to each, are an int32, the first in its lowest bits. Nothing is calibrated: each weight becomes
the nearest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from export_scripts.quantization.bands import Errors, bands, filled, in_bytes, largest, magnitudes
from export_scripts.quantization.compressed import quantization_config, scales
from export_scripts.quantization.record import WORDS, Encoded, Output, Quantization, Shape
from export_scripts.tensors.dtypes import Array, item_bytes, widen

_GROUP, _IN_A_WORD = 128, 8
_LEAST, _LARGEST = -8, 7


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
        rows, columns = values.shape
        grouped = values.reshape(-1, _GROUP)
        # Half of all the numbers that four bits have, though the type has one more below zero than above.
        peaks = largest(magnitudes(grouped), data_type, 1)
        stored = scales(peaks, (_LARGEST - _LEAST) / 2, data_type)
        scale = widen(stored, data_type)
        peak = float((peaks / scale).max())
        packed, errors = np.empty((len(grouped), _GROUP // 2), np.uint8), Errors(len(grouped))
        for place, band in bands(grouped, data_type):
            np.divide(band.values, scale[place, None], out=band.scaled)
            np.rint(band.scaled, out=band.rounded)
            np.minimum(band.rounded, filled(band.rounded.shape, _LARGEST), out=band.rounded)
            if peak > -_LEAST + 0.5:
                np.maximum(band.rounded, filled(band.rounded.shape, _LEAST), out=band.rounded)
            codes = band.rounded.astype(np.int8).view(np.uint8)
            codes -= np.uint8(_LEAST % 256)
            in_bytes(codes, packed[place])
            band.rounded -= band.scaled
            errors.add(place, band.rounded, band.scaled)
        contents = packed.reshape(rows, -1), stored.reshape(rows, -1)
        return Encoded(contents, *errors.of(scale).reshape(2, rows, -1).sum(2))

    def config(self, stays: Sequence[str]) -> dict[str, Any]:
        weights = {
            **{"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP},
            "dynamic": False,
        }
        return quantization_config("pack-quantized", weights, None, stays)

    def problem(self, shape: Shape) -> str:
        return "" if shape[1] % _GROUP == 0 else f"its rows of {shape[1]} numbers are no groups of {_GROUP}"
