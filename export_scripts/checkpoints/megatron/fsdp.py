"""What Megatron-FSDP saves (``ckpt_format: fsdp_dtensor``) in the names of megatron-core's other checkpoints.

A directory of torch's distributed checkpointing, whose keys have the training's wrappers before them and whose layers
and experts are numbered. Names: megatron-core, ``transformer/fsdp_dtensor_checkpoint.py``; how a rank's rows lie in the
whole: ``distributed/fsdp/src/megatron_fsdp/uneven_dtensor.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.chunked import ChunkedState
from export_scripts.checkpoints.files.distributed import OF_CORE
from export_scripts.checkpoints.files.distributed_metadata import METADATA_FILE
from export_scripts.checkpoints.megatron.fused_sections import recurrent_of, sections_of
from handover.errors import CheckpointError
from models.checks import shown

_MODEL = "model."
_WRAPPERS = ("model", "module")
_RANKS = ("tensor_model_parallel_size", "expert_tensor_parallel_size")
_HINT = "save the run once with ckpt_format torch_dist: it is read"
_FUSED = re.compile(r"linear_fc1\.(?:weight|bias)\d*$")


def is_fsdp(archive: Archive, folder: str) -> bool:
    """Whether a folder is torch's own kind of distributed checkpoint: megatron-core's have files beside the tensors."""
    return f"{folder}{METADATA_FILE}" in archive and not any(f"{folder}{name}" in archive for name in OF_CORE)


def without_wrappers(key: str) -> str:
    """Drop the names of the state's section and of the wrappers around a model; other keys stay."""
    parts = key.split(".")
    while key.startswith(_MODEL) and parts and parts[0] in _WRAPPERS:
        parts = parts[1:]
    return ".".join(parts)


def settle_fsdp(path: Path, state: ChunkedState, activation: object, fields: Mapping[str, Any]) -> None:
    """Take the sections of recurrent layers apart, which Megatron-FSDP leaves in one tensor.

    Megatron-Bridge takes those of the gated delta rule apart itself, and leaves Mamba's.

    Raises:
        CheckpointError: rows of one tensor are in the order of the ranks.
    """
    _refuse_interleaved(path, state.keys(), activation, fields)
    block = recurrent_of(fields)
    if block is None:
        return
    ranks = fields.get(_RANKS[0]) or 1

    def sections(key: str, shape: tuple[int, ...]) -> Mapping[str, int]:
        found = sections_of(key, shape, block, 1, str(path))
        if found and ranks != 1:
            raise CheckpointError(
                f"{path} was saved by Megatron-FSDP with {_RANKS[0]} {shown(ranks)}: {key} holds its sections in the "
                "order of the ranks",
                _HINT,
            )
        return found

    state.cut_rows(sections)


def _refuse_interleaved(path: Path, keys: Iterable[str], activation: object, fields: Mapping[str, Any]) -> None:
    """Refuse a gate and its up projection that lie in one matrix, cut by several ranks: each rank has both there.

    Megatron-FSDP takes the two apart where the activation is SwiGLU, and leaves the matrix as it is otherwise.

    Args:
        path: of the checkpoint, for the error.
        keys: of the model.
        activation: of the feed-forward, in NeMo's words.
        fields: of the training's configuration.

    Raises:
        CheckpointError: the rows are in the order of the ranks.
    """
    is_gated = "glu" in str(activation) or str(activation).startswith("gated")
    several = [f"{name} {shown(fields[name])}" for name in _RANKS if fields.get(name) not in (None, 1)]
    if is_gated and several and any(_FUSED.search(key) for key in keys):
        raise CheckpointError(
            f"{path} was saved by Megatron-FSDP with {' and '.join(several)} and the activation "
            f"{shown(activation)}: gate and up projection lie in one matrix, in the order of the ranks",
            _HINT,
        )
