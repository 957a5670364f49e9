"""A Hugging Face directory that goes back to its own architecture: its tensors, key by key, and its configuration.

Quantized weights are dequantized, or kept as they are stored where their own format is asked for: numbers and scales
are then copied with what ``config.json`` says of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import models
from export_scripts.checkpoints.files.safetensors_file import SafeTensor
from export_scripts.checkpoints.huggingface.quantized import QuantizedTensor
from export_scripts.checkpoints.source import OwnModel, Source
from export_scripts.conversion.move.assembly import Assembly
from export_scripts.conversion.move.placement import assemble
from export_scripts.conversion.write.safetensors_layout import PlannedTensor
from export_scripts.quantization.fp8 import Fp8
from export_scripts.quantization.fp8_block import Fp8Block
from export_scripts.quantization.mxfp4 import Mxfp4
from export_scripts.quantization.record import WORDS, Quantization
from export_scripts.tensors.small_floats import BYTE, E4M3, E8M0, FP4
from export_scripts.weights.schema import Assignment, LazyTensor, Rule
from export_scripts.weights.sequences import Lazily
from ft_format.layout import FtDims, TensorSpec
from handover.errors import CheckpointError
from models.decoder import Decoder
from models.quantization import CHANNEL, TENSOR

_BLOCK = Fp8Block.grain
_MOST_LISTED = 10
Stored = Mapping[str, tuple[LazyTensor, str]]
"""Tensors as files have them, by their names there, and what the numbers of each are."""


def own_quantized(own: OwnModel, quantization: Quantization | None) -> Stored:
    """List the numbers and scales of quantized weights, if their format is the one asked for; empty: it is not.

    Raises:
        CheckpointError: some are of it and some are not, or they lie in files that are not safetensors.
    """
    held = {name: each for name, each in own.tensors.items() if isinstance(each, QuantizedTensor)}
    if quantization is None or own.is_renamed or not own.quantization:
        return {}
    formats = {name: _format(each) for name, each in held.items()}
    if quantization.name not in formats.values():
        return {}
    mixed = [f"{name}  {each}" for name, each in formats.items() if each != quantization.name]
    mixed += [f"{name}  not in safetensors" for name, each in held.items() if not _is_safe(each)]
    if mixed:
        raise CheckpointError(
            f"quantization={quantization.name}: the checkpoint's weights of that format are kept as they are, and "
            f"{len(mixed)} others are not of it\n  " + "\n  ".join(mixed[:_MOST_LISTED]),
            "leave export.model.quantization out, and quantize what is then written",
        )
    found: dict[str, tuple[LazyTensor, str]] = {}
    for each in held.values():
        numbers, scales = each.keys
        found[numbers] = each.numbers, each.kind
        found[scales] = each.scales, E8M0 if each.scales.data_type == BYTE else each.scales.data_type
    return {**found, **{name: (each, each.data_type) for name, each in own.scales.items()}}


def _format(tensor: QuantizedTensor) -> str:
    """Name a weight's format as ``export.model.quantization`` does; another one by its method and block."""
    if tensor.kind == FP4:
        return Mxfp4.name
    if tensor.kind == E4M3 and tensor.method == "fp8" and tensor.block == _BLOCK:
        return Fp8Block.name
    if tensor.kind == E4M3 and tensor.method == "compressed-tensors" and tensor.block in (CHANNEL, TENSOR):
        return Fp8.name
    rows, columns = (size or "all" for size in tensor.block)
    return f"{tensor.kind} of {tensor.method}, a scale for {rows} x {columns}"


def _is_safe(tensor: QuantizedTensor) -> bool:
    return isinstance(tensor.numbers, SafeTensor) and isinstance(tensor.scales, SafeTensor)


def own_tensors(own: OwnModel, stored: Stored) -> Mapping[str, LazyTensor]:
    """List the tensors to write: those of the model, or what is stored in the place of the quantized ones."""
    if not stored:
        return own.tensors
    others = {name: each for name, each in own.tensors.items() if not isinstance(each, QuantizedTensor)}
    return {**others, **{name: each for name, (each, _) in stored.items()}}


def planned_own(
    opened: Source, tensors: Mapping[str, LazyTensor], stored: Stored, data_type: str
) -> Sequence[PlannedTensor]:
    """Plan a model's own tensors, unchanged but for the type of those that are not ``stored``.

    Predictors that its class passes over keep in fp32 what its layers do.
    """
    described = opened.dims.tensors() if isinstance(opened.dims, Decoder) else {}
    fixed = {name: "fp32" for name, each in described.items() if each.stays_fp32}
    ends = {name.rpartition(".")[2] for name in fixed}
    fixed |= {name: "fp32" for name in tensors.keys() - described.keys() if name.rpartition(".")[2] in ends}
    names = tuple(tensors)

    def planned(number: int) -> PlannedTensor:
        name = names[number]
        tensor = tensors[name]
        if name in stored:
            return _as_stored(name, *stored[name])
        make, fixed_type = partial(_whole, name, tensor), fixed.get(name, "") if tensor.data_type != data_type else ""
        return PlannedTensor(name, tensor.shape, tensor.shape, make, bool(tensor.unproved), fixed_type=fixed_type)

    return Lazily(planned, range(len(names)))


def _as_stored(name: str, tensor: LazyTensor, kind: str) -> PlannedTensor:
    word, axes = WORDS.get(tensor.data_type, tensor.data_type), tensor.shape or (1,)
    make = partial(_whole, name, tensor, kind)
    return PlannedTensor(name, tensor.shape, axes, make, bool(tensor.unproved), fixed_type=kind, word=word)


def _whole(name: str, tensor: LazyTensor, kind: str = "") -> Assembly:
    target = TensorSpec(tensor.shape or (1,))
    whole = assemble(Assignment(name, target, (name,), Rule(name, _with_an_axis)), (tensor,), FtDims())
    if not kind:
        return whole
    return replace(whole, terms=tuple(tuple(replace(each, data_type=kind) for each in term) for term in whole.terms))


def _with_an_axis(values: Any, dims: Any) -> Any:
    """Show a tensor as it is; a scale that is one number has no axis to cut by."""
    return np.atleast_1d(values)


def own_config(opened: Source, own: OwnModel, data_type: str, given_ids: Mapping[str, int | None]) -> dict[str, Any]:
    """Return ``config.json``: the model's own, with the keys that engines read, and what is given.

    Args:
        opened: the model.
        own: as its directory has it.
        data_type: of its weights, in torch's words.
        given_ids: special ids in place of its own, by key; None: its own.
    """
    config = {key: value for key, value in own.config.items() if key != "dtype"}
    if isinstance(opened.dims, Decoder) and not opened.beyond:
        config = models.find(config.get("model_type")).for_engines(config, opened.dims)
    config |= {key: value for key, value in given_ids.items() if value is not None}
    return {**config, "torch_dtype": data_type}
