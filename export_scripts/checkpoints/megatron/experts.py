"""Experts in the file of one training rank, each under the key that it would have if no other rank had any.

megatron-core, ``transformer/moe/experts.py``: ``SequentialMLP`` has modules (``local_experts.<k>``), ``TEGroupedMLP``
parameters for each (``weight<k>``) or an array of all (``moe_single_grouped_weight``), ``GroupedMLP`` (to 0.15) all of
them in one matrix, whose memory is [experts, in, out]. An expert-parallel rank numbers its own from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from export_scripts.checkpoints.files.pickled import StoredTensor
from handover.errors import CheckpointError

MARK = ".mlp.experts."
"""What the keys of experts have in them; those that every token uses are ``shared_experts``."""
_OWN = re.compile(r"(.*\.mlp\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)")
_ARRAY = re.compile(r"(.*\.mlp\.experts\.)(linear_fc[12]\.(?:weight|bias))")
_MATRIX = re.compile(r"(.*\.mlp\.experts\.)weight([12])")


def numbered(state: Mapping[str, Any], rank: int, count: int, where: str) -> dict[str, Any]:
    """Number a rank's experts as the model does, and show those that lie in one tensor each by itself.

    Raises:
        CheckpointError: a tensor of several experts is not one of as many.
    """
    named = (each for key, value in state.items() for each in _numbered(key, value, rank * count, count, where))
    return dict(named)


def _numbered(key: str, value: Any, first: int, count: int, where: str) -> Iterator[tuple[str, Any]]:
    if own := _OWN.fullmatch(key):
        yield f"{own[1]}{first + int(own[2])}{own[3]}", value
    elif array := _ARRAY.fullmatch(key):
        for k, each in enumerate(_in_array(value, count, f"{where}: {key}")):
            yield f"{array[1]}local_experts.{first + k}.{array[2]}", each
    elif matrix := _MATRIX.fullmatch(key):
        for k, each in enumerate(_in_matrix(value, count, matrix[2] == "1", f"{where}: {key}")):
            yield f"{matrix[1]}local_experts.{first + k}.linear_fc{matrix[2]}.weight", each
    else:
        yield key, value


def _in_array(whole: Any, count: int, where: str) -> Iterator[StoredTensor]:
    """Show the experts of an array [experts, ...]."""
    _check(whole, len(getattr(whole, "shape", ())), 0, count, where)
    if whole.shape[0] != count:
        raise _of_others(whole, count, where)
    for k in range(count):
        yield replace(whole, offset=whole.offset + k * whole.stride[0], shape=whole.shape[1:], stride=whole.stride[1:])


def _in_matrix(whole: Any, count: int, is_inward: bool, where: str) -> Iterator[StoredTensor]:
    """Show the experts of GroupedMLP's matrix, [out, in]: of the hidden size times all experts', or the other way."""
    _check(whole, 2, int(is_inward), count, where)
    rows, columns = whole.shape
    inner, outer = (rows, columns // count) if is_inward else (rows // count, columns)
    for k in range(count):
        yield replace(whole, offset=whole.offset + k * inner * outer, shape=(outer, inner), stride=(1, outer))


def _check(whole: Any, axes: int, axis: int, count: int, where: str) -> None:
    """Make sure that a tensor is row-major and that an axis divides by the experts."""
    if not isinstance(whole, StoredTensor) or len(whole.shape) != axes or axes < 2 or whole.shape[axis] % count:
        raise _of_others(whole, count, where)
    if whole.stride != tuple(prod(whole.shape[place + 1 :]) for place in range(axes)):
        raise CheckpointError(f"{where} is not row-major", "save the run again")


def _of_others(whole: Any, count: int, where: str) -> CheckpointError:
    shape = list(getattr(whole, "shape", ()))
    return CheckpointError(f"{where} has the shape {shape}, which is none of {count} experts", "copy it again")
