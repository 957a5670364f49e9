"""Fused tensors of recurrent layers in the file of one training rank, by section under distributed checkpoints' keys.

megatron-core, ``ssm/mamba_mixer.py`` and ``ssm/gated_delta_net/common.py``: a rank has its own rows of every section,
one section after another, so that the ranks' tensors are not parts of the whole; ``sharded_state_dict`` takes them
apart (``_split_tensor_factory``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from export_scripts.checkpoints.files.pickled import StoredTensor
from export_scripts.checkpoints.nemo.delta_rule import delta_sizes, is_delta
from export_scripts.checkpoints.nemo.hybrid import is_hybrid, mamba_sizes
from handover.errors import CheckpointError
from models.blocks.delta_rule import DeltaRule
from models.blocks.mamba import Mamba

_IN = "in_proj"
_FUSED = re.compile(rf"(.*\.(?:mixer|self_attention)\.)({_IN}|conv1d)[._](weight|bias)")
"""Mamba's convolution is a module up to mid-2026, and two parameters of the mixer since."""
Recurrent = Mamba | DeltaRule


def recurrent_of(fields: Mapping[str, Any]) -> Recurrent | None:
    """Read the layers that keep a state, whose tensors lie in one, of a training's fields; None: there are none."""
    if is_hybrid(fields):
        return Mamba(**mamba_sizes(fields))
    return DeltaRule(**delta_sizes(fields)) if is_delta(fields) else None


def sections_of(key: str, shape: Sequence[int], block: Recurrent, ranks: int, where: str) -> dict[str, int]:
    """Return the rows of a fused tensor's sections, by their keys; none: it is not fused.

    Args:
        key: of one rank's tensor.
        shape: its own.
        block: the kind of layers.
        ranks: tensor-parallel ranks.
        where: the file, for errors.

    Raises:
        CheckpointError: the tensor has not the rows of a rank.
    """
    found = _FUSED.fullmatch(key)
    if not found:
        return {}
    names = block.in_sections if found[2] == _IN else block.conv_sections
    rows = {f"{found[1]}{found[2]}.{found[3]}.{name}": block.widths[name] // ranks for name in names}
    heads = block.key_head_num if isinstance(block, DeltaRule) else ranks
    if not shape or shape[0] != sum(rows.values()) or heads % ranks:
        raise CheckpointError(
            f"{where}: {key} has the shape {list(shape)}, and {sum(rows.values())} rows are a rank's of {ranks}",
            "the arguments say how many heads, groups and states there are",
        )
    return rows


def taken_apart(state: Mapping[str, Any], block: Recurrent, ranks: int, where: str) -> dict[str, Any]:
    """Show the sections of fused tensors of a rank's file each by itself; see ``sections_of``.

    What goes into the gated delta rule is shown by the heads of its keys, as some models store it.
    """
    return dict(each for key, value in state.items() for each in _sections(key, value, block, ranks, where))


def _sections(key: str, value: Any, block: Recurrent, ranks: int, where: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, StoredTensor) or not (rows := sections_of(key, value.shape, block, ranks, where)):
        yield key, value
        return
    start = value.offset
    for name, count in rows.items():
        part = replace(value, offset=start, shape=(count, *value.shape[1:]))
        start += count * value.stride[0]
        if isinstance(block, DeltaRule) and f".{_IN}." in name:
            part = _by_heads(part, block.key_head_num // ranks)
        yield name, part


def _by_heads(part: StoredTensor, heads: int) -> StoredTensor:
    """Show rows as [heads, rows of one, ...]."""
    each = part.shape[0] // heads
    shape, stride = (heads, each, *part.shape[1:]), (each * part.stride[0], *part.stride)
    return replace(part, shape=shape, stride=stride)
