"""Distributed checkpoints of megatron-core: which backend wrote one, and its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.checkpoints.files.chunked import Chunk, ChunkedState, ChunkedTensor
from export_scripts.checkpoints.files.distributed_metadata import METADATA_FILE
from export_scripts.checkpoints.files.distributed_torch import TRAINING_MODULES, read_torch_dist
from export_scripts.checkpoints.files.distributed_zarr import other_zarr_keys, read_zarr
from export_scripts.checkpoints.files.pickled import StoredTensor
from export_scripts.checkpoints.files.torch_format import open_torch_file
from export_scripts.weights.values import Fields
from handover.errors import CheckpointError
from models.checks import shown

_MOST_VALUES = 1_000_000
COMMON_FILE, BACKEND_FILE = "common.pt", "metadata.json"
OF_CORE = (COMMON_FILE, BACKEND_FILE)
"""Files that megatron-core has beside the tensors; newer versions have the second alone."""
_COMMON_KEY = "common_state/shard_0_1"
_COMMON_NAMES = ("args", "checkpoint_version")  # of what Megatron-FSDP saves key by key
# Of common.pt; its tensors are training's own.
_TRAINING_KEYS = ("optimizer", "chained_", "rng_state", "opt_param_scheduler", "lr_schedulers", "loops", "callbacks")


def is_distributed(archive: Archive, folder: str) -> bool:
    """Whether a folder holds a distributed checkpoint."""
    return f"{folder}{METADATA_FILE}" in archive or f"{folder}{BACKEND_FILE}" in archive


def open_distributed(archive: Archive, folder: str, rename: Callable[[str], str] = str) -> ChunkedState:
    """Open a distributed checkpoint.

    Args:
        archive: the files.
        folder: of the checkpoint within them, with a slash at its end; empty: the root.
        rename: from a stored key to the table's.

    Raises:
        CheckpointError: of a backend that is not read, damaged, or incomplete.
    """
    backend = _backend(archive, folder)
    if backend == "torch_dist":
        found = read_torch_dist(archive, folder)
        tensors = {**found.tensors, **_common_tensors(archive, folder)}
        return ChunkedState(tensors, tuple(found.objects), rename, found.objects)
    if backend != "zarr":
        raise CheckpointError(
            f"{archive.path}: distributed checkpoints of the backend '{shown(backend)}' are not read",
            "zarr and torch_dist are",
        )
    tensors = {**read_zarr(archive, folder), **_common_tensors(archive, folder)}
    return ChunkedState(tensors, other_zarr_keys(archive, folder), rename)


def read_common(archive: Archive, folder: str, state: ChunkedState) -> Mapping[str, Any]:
    """Read what is not distributed, the training's arguments among it.

    It is a file; or, of newer versions of megatron-core, an object among the distributed ones
    (``dist_checkpointing/serialization.py``, ``load_common_state_dict``); or, of Megatron-FSDP, an object each.
    """
    name = f"{folder}{COMMON_FILE}"
    if name in archive:
        return open_torch_file(archive, name, _common, TRAINING_MODULES).state
    if _COMMON_KEY in state.objects:
        content = state.objects[_COMMON_KEY]()
        return _common(content[0] if isinstance(content, list) and content else content, name)
    return {key: state.objects[key]() for key in _COMMON_NAMES if key in state.objects}


def _backend(archive: Archive, folder: str) -> str:
    name = f"{folder}{BACKEND_FILE}"
    if name not in archive:
        return "torch_dist"
    where = f"{archive.path}: {name}"
    return Fields(parse_json(archive.read_bytes(name), where), where).text("sharded_backend")


def _common(content: Any, where: str) -> Mapping[str, Any]:
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def _common_tensors(archive: Archive, folder: str) -> dict[str, ChunkedTensor]:
    """Tensors of the model that were not distributed: none is dropped silently."""
    name = f"{folder}{COMMON_FILE}"
    if name not in archive:
        return {}
    file = open_torch_file(archive, name, lambda *saved: flat(_common(*saved)), TRAINING_MODULES)
    return {
        key: ChunkedTensor(
            key,
            stored.shape,
            stored.storage.data_type,
            (Chunk((0,) * len(stored.shape), stored.shape, lambda stored=stored: file.read(stored)),),  # type: ignore[misc]
        )
        for key, stored in file.state.items()
        if isinstance(stored, StoredTensor) and not key.startswith(_TRAINING_KEYS)
    }


def flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """List what nested dictionaries hold, under keys joined by dots.

    Raises:
        ValueError: one is within itself, or so often within others that the list has no end.
    """
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", content)]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return found
        prefix, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(f"{prefix}.{key}" if prefix else str(key), each) for key, each in reversed(value.items())]
        else:
            found[prefix] = value
    raise ValueError(f"its dictionaries hold more than {_MOST_VALUES:,} values")
