"""What the formats of compressed-tensors have in common: how scales are computed, and their configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from export_scripts.tensors.dtypes import DIGITS, Array, recast, widen


def scales(peaks: Array, largest: float, data_type: str) -> Array:
    """Return what the largest magnitudes are divided by to become ``largest``, in a type of weights.

    Args:
        peaks: fp32.
        largest: number to become.
        data_type: of the result, as it is stored.
    """
    stored = recast(peaks / np.float32(largest), "fp32", data_type)
    epsilon = np.float32(2.0 ** (1 - DIGITS[data_type]))  # torch.finfo's, which the library takes for rows of zeros
    return recast(np.where(widen(stored, data_type) == 0, epsilon, widen(stored, data_type)), "fp32", data_type)


def quantization_config(
    form: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None, stays: Sequence[str]
) -> dict[str, Any]:
    """Return ``quantization_config`` for linear layers that are all quantized alike.

    Args:
        form: the library's name of how tensors are stored.
        weights: how they are quantized.
        activations: how these are, while the model is served; None: they are not.
        stays: names of the linear layers that are not quantized.
    """
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(stays),
        "kv_cache_scheme": None,
    }
