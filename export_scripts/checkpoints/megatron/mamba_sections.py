"""Mamba 2's fused tensors in the file of one training rank, each section under the key of distributed checkpoints.

megatron-core, ``ssm/mamba_mixer.py``: a rank has its own rows of every section, one section after another, so that the
ranks' tensors are not parts of the whole; ``sharded_state_dict`` takes them apart (``_split_tensor_factory``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from export_scripts.checkpoints.files.pickled import StoredTensor
from handover.errors import CheckpointError
from models.blocks.mamba import CONV_SECTIONS, IN_SECTIONS, Mamba

_FUSED = re.compile(r"(.*\.mixer\.)(in_proj|conv1d)[._](weight|bias)")
"""The convolution is a module up to mid-2026, and two parameters of the mixer since."""
_SECTIONS = {"in_proj": IN_SECTIONS, "conv1d": CONV_SECTIONS}


def taken_apart(state: Mapping[str, Any], mamba: Mamba, ranks: int, where: str) -> dict[str, Any]:
    """Show the sections of fused tensors each by itself.

    Args:
        state: of the model, by key.
        mamba: the block.
        ranks: tensor-parallel ranks.
        where: the file, for errors.

    Raises:
        CheckpointError: a tensor has not the rows of a rank.
    """
    return dict(each for key, value in state.items() for each in _sections(key, value, mamba, ranks, where))


def _sections(key: str, value: Any, mamba: Mamba, ranks: int, where: str) -> Iterator[tuple[str, Any]]:
    found = _FUSED.fullmatch(key)
    if not found:
        yield key, value
        return
    rows = {name: mamba.widths[name] // ranks for name in _SECTIONS[found[2]]}
    shape = getattr(value, "shape", ())
    if not isinstance(value, StoredTensor) or not shape or shape[0] != sum(rows.values()):
        raise CheckpointError(
            f"{where}: {key} has the shape {list(shape)}, and {sum(rows.values())} rows are a rank's of {ranks}",
            "the arguments say how many heads, groups and states there are",
        )
    start = value.offset
    for name, count in rows.items():
        part = replace(value, offset=start, shape=(count, *shape[1:]))
        yield f"{found[1]}{found[2]}.{found[3]}.{name}", part
        start += count * value.stride[0]
