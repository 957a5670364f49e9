"""Which tensors of a Hugging Face directory are quantized: the matrices of its layers, and what they became."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import sqrt
from typing import Any

import models
from export_scripts.conversion.write.journal import QuantizationRecord
from export_scripts.conversion.write.safetensors_layout import PlannedTensor
from export_scripts.quantization import QUANTIZATIONS
from export_scripts.quantization.record import Quantization
from export_scripts.tensors.dtypes import item_bytes
from export_scripts.tensors.small_floats import BYTES
from export_scripts.weights.sequences import Lazily
from handover.errors import CheckpointError, nearest
from models.checks import shown
from models.quantization import LAYER, stays

CONFIG_KEY = "quantization_config"
_MOST_LISTED = 10


def find_quantization(name: str | None, allow_nonfinite: bool = False) -> Quantization | None:
    """Find what is asked for; None: nothing is.

    Raises:
        CheckpointError: it is not known, or numbers that have no scale may come.
    """
    if name is None:
        return None
    if name not in QUANTIZATIONS:
        raise CheckpointError(f"quantization '{name}' is unknown", nearest(name, QUANTIZATIONS))
    if allow_nonfinite:
        raise CheckpointError(
            f"allow_nonfinite with quantization={name}: a row with NaN or infinity has no scale",
            "leave one of them out",
        )
    return QUANTIZATIONS[name]


def quantized(
    planned: Sequence[PlannedTensor], config: Mapping[str, Any], quantization: Quantization, data_type: str
) -> tuple[Sequence[PlannedTensor], dict[str, Any]]:
    """Plan the matrices of all layers as quantized, and say so in config.json.

    Raises:
        CheckpointError: the model's tensors are not known, or there are some that cannot be quantized.
    """
    asked = f"quantization={quantization.name}"
    architecture = _architecture(config, quantization)
    staying, problems, are_quantized = [architecture.all_names["head"]], list[str](), bytearray(len(planned))
    for number, tensor in enumerate(planned):
        axes, is_outer = len(tensor.shape), not LAYER.search(tensor.name)
        if axes < 2 or (is_outer and not architecture.is_passed_over(tensor.name)):
            continue
        if stays(tensor.name):
            staying.append(tensor.name.removesuffix(".weight"))
        elif quantization.takes(tensor.name, tensor.shape):
            problems += _problems(tensor, quantization, data_type)
            are_quantized[number] = True
        else:
            problems += [f"{tensor.name}  {list(tensor.shape)}  is not the matrix of one linear layer"] * (axes > 2)
    if problems:
        more = [f"and {len(problems) - _MOST_LISTED} more"] if len(problems) > _MOST_LISTED else []
        raise CheckpointError(
            f"{asked} has no form for {len(problems)} tensors\n  " + "\n  ".join([*problems[:_MOST_LISTED], *more]),
            "take another export.model.quantization, or leave it out",
        )

    def result(number: int) -> PlannedTensor:
        return replace(planned[number], quantization=quantization if are_quantized[number] else None)

    return Lazily(result, range(len(planned))), {**config, CONFIG_KEY: quantization.config(staying)}


def _architecture(config: Mapping[str, Any], quantization: Quantization) -> models.Architecture:
    """Find what the model is.

    Raises:
        CheckpointError: the model is not one whose tensors are known, or not one that the quantization is for.
    """
    asked, model_type = f"quantization={quantization.name}", config.get("model_type")
    if quantization.model_types and model_type not in quantization.model_types:
        raise CheckpointError(
            f"{asked} is for {', '.join(quantization.model_types)}, this model is {shown(model_type)}",
            "take another export.model.quantization, or leave it out",
        )
    try:
        return models.find(model_type)
    except models.ModelError as error:
        raise CheckpointError(
            f"{asked}: which tensors of {shown(model_type)} are linear layers is not known here", error.hint
        ) from None


def _problems(tensor: PlannedTensor, quantization: Quantization, data_type: str) -> list[str]:
    where = f"{tensor.name}  {list(tensor.shape)}  "
    problem = quantization.problem(tensor.shape)
    if problem or tensor.shape[0] % tensor.axes[0]:
        return [where + (problem or "has one row")]
    outputs = quantization.outputs(tensor.name, tensor.shape, data_type)
    # Readers take a tensor of numbers of n bytes at a multiple of n bytes alone.
    unit = max(item_bytes(data_type), *(output.item_bytes for output in outputs))
    ends = accumulate(output.size_bytes for output in outputs)
    return [f"{where}its parts would not begin at multiples of {unit} bytes"] * any(end % unit for end in ends)


def rank_problems(
    tensors: Iterable[PlannedTensor], config: Mapping[str, Any], ranks: int, quantization: Quantization
) -> list[str]:
    """List the quantized matrices of which ranks of tensor parallelism have no whole groups or blocks, one line each.

    Args:
        tensors: of the directory.
        config: its config.json.
        ranks: how many.
        quantization: what its matrices became, or were already.
    """
    decoder = models.find(config.get("model_type")).read(config)
    known, problems = decoder.tensors(), []
    for tensor in tensors:
        spec = known.get(tensor.name)
        axis = spec.split_axis if spec else None
        is_quantized = tensor.quantization is not None or tensor.fixed_type in BYTES
        if not is_quantized or spec is None or axis is None or ranks == 1:
            continue
        units = spec.axes[axis]
        # Heads of keys and values that are fewer than the ranks are not divided: several ranks have the same.
        parts = min(ranks, decoder.axis_size(units[0])) if isinstance(units, tuple) else ranks
        grain = quantization.grain[axis]
        if tensor.shape[axis] % (parts * grain):
            problems.append(
                f"{tensor.name}  {list(tensor.shape)}  axis {axis} is not {parts} times a multiple of {grain}"
            )
    return problems


def report(costs: Iterable[QuantizationRecord]) -> dict[str, dict[str, Any]]:
    """Return for the manifest what quantizing each tensor has cost: norms beside those of the weights."""
    by_tensor: dict[str, list[QuantizationRecord]] = {}
    for cost in costs:
        by_tensor.setdefault(cost.tensor, []).append(cost)
    return {name: _error(by_tensor[name]) for name in sorted(by_tensor)}


def _error(costs: Sequence[QuantizationRecord]) -> dict[str, Any]:
    square, worst = sum(cost.square for cost in costs), max(costs, key=lambda cost: (cost.worst, -cost.worst_row))
    error = sqrt(sum(cost.squared_error for cost in costs) / square) if square else 0.0
    return {"error": _digits(error), "worst_row": worst.worst_row, "worst_error": _digits(worst.worst)}


def _digits(number: float) -> float:
    return float(f"{number:.4g}")
