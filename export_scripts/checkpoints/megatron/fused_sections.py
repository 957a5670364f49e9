"""Fused tensors of recurrent layers in the file of one training rank, by section under distributed checkpoints' keys.

megatron-core, ``ssm/mamba_mixer.py`` and ``ssm/gated_delta_net/common.py``: a rank has its own rows of every section,
one section after another, so that the ranks' tensors are not parts of the whole; ``sharded_state_dict`` takes them
apart (``_split_tensor_factory``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from export_scripts.checkpoints.files.pickled import StoredTensor
from handover.errors import CheckpointError
from models.blocks.delta_rule import DeltaRule
from models.blocks.mamba import Mamba

_FUSED = re.compile(r"(.*\.(?:mixer|self_attention)\.)(in_proj|conv1d)[._](weight|bias)")
"""Mamba's convolution is a module up to mid-2026, and two parameters of the mixer since."""
Recurrent = Mamba | DeltaRule


def taken_apart(state: Mapping[str, Any], block: Recurrent, ranks: int, where: str) -> dict[str, Any]:
    """Show the sections of fused tensors each by itself.

    What goes into the gated delta rule is shown by the heads of its keys, as some models store it.

    Args:
        state: of the model, by key.
        block: the kind of layers.
        ranks: tensor-parallel ranks.
        where: the file, for errors.

    Raises:
        CheckpointError: a tensor has not the rows of a rank.
    """
    return dict(each for key, value in state.items() for each in _sections(key, value, block, ranks, where))


def _sections(key: str, value: Any, block: Recurrent, ranks: int, where: str) -> Iterator[tuple[str, Any]]:
    found = _FUSED.fullmatch(key)
    if not found:
        yield key, value
        return
    names = block.in_sections if found[2] == "in_proj" else block.conv_sections
    rows = {name: block.widths[name] // ranks for name in names}
    heads = block.key_head_num if isinstance(block, DeltaRule) else ranks
    shape = getattr(value, "shape", ())
    if not isinstance(value, StoredTensor) or not shape or shape[0] != sum(rows.values()) or heads % ranks:
        raise CheckpointError(
            f"{where}: {key} has the shape {list(shape)}, and {sum(rows.values())} rows are a rank's of {ranks}",
            "the arguments say how many heads, groups and states there are",
        )
    is_by_heads = isinstance(block, DeltaRule) and found[2] == "in_proj"
    start = value.offset
    for name, count in rows.items():
        part = replace(value, offset=start, shape=(count, *shape[1:]))
        start += count * value.stride[0]
        yield f"{found[1]}{found[2]}.{found[3]}.{name}", _by_heads(part, heads // ranks) if is_by_heads else part


def _by_heads(part: StoredTensor, heads: int) -> StoredTensor:
    """Show rows as [heads, rows of one, ...]."""
    each = part.shape[0] // heads
    shape, stride = (heads, each, *part.shape[1:]), (each * part.stride[0], *part.stride)
    return replace(part, shape=shape, stride=stride)
