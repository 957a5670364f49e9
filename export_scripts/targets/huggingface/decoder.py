"""Decoders whose tensors are the model's own, Llama and its relatives: architectures of models/ as targets."""

from __future__ import annotations

from typing import Any

import models
from export_scripts.targets.huggingface.table import Facts, Taken, Target
from export_scripts.weights.layouts import less_one, plus_one
from models.architecture import ZERO_CENTRED
from models.decoder import Decoder
from models.tensor import Tensor


def _target(architecture: models.Architecture) -> Target:
    stores_less_one = bool(architecture.has.get(ZERO_CENTRED))

    def tensors(dims: Decoder, facts: Facts) -> dict[str, Taken]:
        norms, stored_as = dims.norm_names, None
        if stores_less_one != dims.norms.is_zero_centred:
            stored_as = less_one if stores_less_one else plus_one
        return {
            name: Taken(
                name,
                merged=_merged(tensor),
                elementwise=stored_as if name in norms else None,
                stays_fp32=tensor.stays_fp32,
            )
            for name, tensor in dims.tensors().items()
        }

    def config(dims: Decoder, facts: Facts) -> dict[str, Any]:
        return architecture.write(dims)

    def problems(dims: Decoder, facts: Facts) -> list[str]:
        return architecture.lacks(dims)

    return Target(architecture.model_type, architecture.class_name, tensors, config, problems)


def _merged(tensor: Tensor) -> tuple[int, ...]:
    """Count the axes of one on disk, of each."""
    return tuple(len(axis) if isinstance(axis, tuple) else 1 for axis in tensor.axes)


HUB_DECODERS = tuple(map(_target, models.ARCHITECTURES))
