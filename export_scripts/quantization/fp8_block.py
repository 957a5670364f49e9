"""FP8 weights in blocks of 128 x 128 with an fp32 scale each: DeepSeek's and Qwen's own files, ``quant_method: fp8``.

A weight is its number times ``weight_scale_inv`` of its block; blocks at the ends may be smaller. Activations are
quantized by whoever serves the model, 128 numbers of a token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from export_scripts.quantization.bands import Errors, bands, largest, magnitudes
from export_scripts.quantization.float_rounding import E4M3
from export_scripts.quantization.record import Encoded, Output, Quantization, Shape
from export_scripts.tensors.dtypes import Array

_SIDE = 128


class Fp8Block(Quantization):
    """Float8 E4M3, a scale for each block."""

    name = "fp8_block"
    rows = _SIDE
    grain = (_SIDE, _SIDE)

    def outputs(self, name: str, shape: Shape, data_type: str) -> tuple[Output, ...]:
        blocks = tuple(-(-size // _SIDE) for size in shape)
        return Output(name, "F8_E4M3", shape, 1), Output(f"{name}_scale_inv", "F32", blocks, 4, _SIDE)

    def encode(self, values: Array, data_type: str) -> Encoded:
        rows, columns = values.shape
        unsigned = magnitudes(values)
        codes, errors = np.empty(values.shape, np.uint8), Errors(rows)
        starts = range(0, rows, _SIDE)
        stored = np.empty((len(starts), -(-columns // _SIDE)), np.float32)
        for number, start in enumerate(starts):
            block = slice(start, min(start + _SIDE, rows))
            scale = self._scales(unsigned[block], data_type)
            stored[number] = scale
            by = np.repeat(scale, _SIDE)[:columns]
            for inner, band in bands(unsigned[block], data_type):
                place = slice(start + inner.start, start + inner.stop)
                np.divide(band.values, by, out=band.scaled)
                E4M3.encode(band.scaled, band, E4M3.largest, codes[place])
                band.rounded *= by
                errors.add(place, band.rounded, band.values)
        E4M3.add_signs(codes, values)
        return Encoded((codes, stored), *errors.of())

    @staticmethod
    def _scales(unsigned: Array, data_type: str) -> Array:
        """Compute the scales of a row of blocks: the largest number of each becomes the largest of the type."""
        peaks = largest(unsigned, data_type, 0)
        peaks = np.pad(peaks, (0, -len(peaks) % _SIDE)).reshape(-1, _SIDE).max(1)
        found: Array = np.where(peaks == 0, np.float32(1), peaks / np.float32(E4M3.largest))
        return found

    def config(self, stays: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_SIDE, _SIDE],
            "modules_to_not_convert": list(stays),
        }
