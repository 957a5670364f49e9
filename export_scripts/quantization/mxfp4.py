"""MXFP4 experts as OpenAI publishes GPT-OSS: numbers of 4 bits (E2M1), a power of two for each 32 of them.

Experts are kept as [expert, in, out] and packed as [expert, out, in]; the model alone says which of the two it is,
since its sizes are equal. The power of two is the largest number's, so that it becomes 4 or 6, or the next one where
it would become more than 7 (OCP Microscaling Formats 1.0, 6.3; compressed-tensors rounds it up as well).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from export_scripts.quantization.float_rounding import E2M1
from export_scripts.quantization.groups import encode, peaks
from export_scripts.quantization.record import Encoded, Output, Quantization, Shape
from export_scripts.tensors.dtypes import Array

_GROUP = 32
_MOST = 1 << 20
"""Numbers that are turned around at a time: an expert has tens of millions."""
_LARGEST_EXPONENT = 2  # of E2M1
_ROUNDED_UP = np.uint32(1 << 21)  # what 1.75 lacks to 2


class Mxfp4(Quantization):
    """E2M1 in groups of 32 along the input."""

    name = "mxfp4"
    model_types = ("gpt_oss",)

    def takes(self, name: str, shape: Shape) -> bool:
        return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))

    def outputs(self, name: str, shape: Shape, data_type: str) -> tuple[Output, ...]:
        experts, columns, rows = shape
        groups = (experts, rows, columns // _GROUP)
        return Output(f"{name}_blocks", "U8", (*groups, _GROUP // 2), 1), Output(f"{name}_scales", "U8", groups, 1)

    def encode(self, values: Array, data_type: str) -> Encoded:
        experts, columns, rows = values.shape
        step = max(1, _MOST // (experts * columns))
        parts = [self._encoded(values[:, :, start : start + step], data_type) for start in range(0, rows, step)]
        packed, scales, errors, squares = (np.concatenate(each, 1) for each in zip(*parts, strict=True))
        contents = packed.reshape(experts, -1), scales.reshape(experts, -1)
        return Encoded(contents, errors.reshape(-1), squares.reshape(-1))

    def _encoded(self, values: Array, data_type: str) -> tuple[Array, ...]:
        """Encode some rows of each expert: numbers and scales [experts, rows, ...], and the sums of their squares."""
        experts, _, rows = values.shape
        grouped = np.ascontiguousarray(values.transpose(0, 2, 1)).reshape(-1, _GROUP)
        peak = peaks(grouped, data_type)
        exponents = ((peak.view(np.uint32) + _ROUNDED_UP) >> 23).astype(np.int32) - _LARGEST_EXPONENT
        np.maximum(exponents, 0, out=exponents)
        codes, *sums = encode(grouped, data_type, E2M1, np.ldexp(np.float32(1), exponents - 127))
        contents = (each.reshape(experts, rows, -1) for each in (codes, exponents.astype(np.uint8)))
        return *contents, *(each.reshape(experts, rows, -1).sum(2) for each in sums)

    def config(self, stays: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
            ],
        }

    def problem(self, shape: Shape) -> str:
        return "" if shape[1] % _GROUP == 0 else f"its {shape[1]} inputs are no groups of {_GROUP}"
