"""FP8 weights with a scale for each output channel: compressed-tensors' ``float-quantized``, as vLLM reads it.

Activations are quantized by whoever serves the model, for each token. The scale is what compressed-tensors takes, in
the type of the other weights; the quotient is computed in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from export_scripts.quantization.compressed import quantization_config, scales
from export_scripts.quantization.float_rounding import E4M3
from export_scripts.quantization.groups import encode, peaks
from export_scripts.quantization.record import WORDS, Encoded, Output, Quantization, Shape
from export_scripts.tensors.dtypes import Array, item_bytes, widen


class Fp8(Quantization):
    """Float8 E4M3, a scale for each row."""

    name = "fp8"

    def outputs(self, name: str, shape: Shape, data_type: str) -> tuple[Output, ...]:
        scale = Output(f"{name}_scale", WORDS[data_type], (shape[0], 1), item_bytes(data_type))
        return Output(name, "F8_E4M3", shape, 1), scale

    def encode(self, values: Array, data_type: str) -> Encoded:
        stored = scales(peaks(values, data_type), E4M3.largest, data_type)
        codes, *sums = encode(values, data_type, E4M3, widen(stored, data_type))
        return Encoded((codes, stored), *sums)

    def config(self, stays: Sequence[str]) -> dict[str, Any]:
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        weights = {**number, "strategy": "channel", "dynamic": False}
        activations = {**number, "strategy": "token", "dynamic": True}
        return quantization_config("float-quantized", weights, activations, stays)
