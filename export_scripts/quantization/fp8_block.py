"""FP8 weights in blocks of 128 x 128 with an fp32 scale each: DeepSeek's and Qwen's own files, ``quant_method: fp8``.

A weight is its number times ``weight_scale_inv`` of its block; blocks at the ends may be smaller. Activations are
quantized by whoever serves the model, 128 numbers of a token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from export_scripts.quantization.float_rounding import E4M3
from export_scripts.quantization.groups import encode, peaks
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
        found = peaks(values, data_type, (_SIDE, _SIDE))
        scale = np.where(found == 0, np.float32(1), found / np.float32(E4M3.largest))
        codes, *sums = encode(values, data_type, E4M3, scale, (_SIDE, _SIDE))
        return Encoded((codes, scale), *sums)

    def config(self, stays: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_SIDE, _SIDE],
            "modules_to_not_convert": list(stays),
        }
