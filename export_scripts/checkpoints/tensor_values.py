"""Read values of a checkpoint before it is converted: a small tensor whole, or two that should be the same."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.tensors.dtypes import STORAGE, Array, widen
from export_scripts.tensors.mapped import Reader
from export_scripts.weights.schema import LazyTensor
from handover.errors import CheckpointError

_COMPARED_BYTES = 4 << 20


def read_whole(tensor: LazyTensor) -> Array:
    """Read a tensor in fp32, its parts joined and its checksums compared.

    Raises:
        CheckpointError: it cannot be read or is damaged.
    """
    reader = Reader(0, set())
    parts = tensor.parts()
    values = [widen(reader.read(part), tensor.data_type) for part in parts]
    for part in parts:
        reader.verify(part)
    return values[0] if tensor.axis is None else np.concatenate(values, tensor.axis)


def same_values(first: LazyTensor, second: LazyTensor, archive: Archive | None = None) -> bool:
    """Whether two tensors hold the same numbers; both are read, unless they are one range of one file.

    Args:
        first: a tensor.
        second: another, whose training shards are cut as those of the first.
        archive: that both lie in; None: it can be mapped.

    Raises:
        CheckpointError: one of them cannot be read, or the archive is compressed.
    """
    if first == second:
        return True
    if first.shape != second.shape:
        return False
    if archive is not None and archive.is_compressed:
        raise CheckpointError(
            f"{archive.path} is compressed and holds a tensor twice, which may differ",
            "unpack it, and give the directory: then the two are compared",
        )
    types = first.data_type, second.data_type
    reader = Reader(0, set())
    for ours, theirs in zip_longest(first.parts(), second.parts()):
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return False
        rows = max(1, _COMPARED_BYTES // max(1, ours[:1].nbytes))
        for start in range(0, len(ours), rows):
            a, b = (reader.read(part[start : start + rows]) for part in (ours, theirs))
            if not (types[0] == types[1] and a.tobytes() == b.tobytes()) and not _equal(a, b, *types):
                return False
    return True


def _equal(first: Array, second: Array, first_type: str, second_type: str) -> bool:
    """Whether numbers of different types, or of different bytes, are the same: both zeros are."""
    if {first_type, second_type} - set(STORAGE):
        return False
    return np.array_equal(widen(first, first_type), widen(second, second_type))
