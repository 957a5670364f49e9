"""Safetensors files of training ranks, each with its rows of the tensors, by torch's distributed checkpointing.

Format: torch, ``distributed/checkpoint/hf_storage.py`` (``save_distributed``), and NeMo AutoModel,
``components/checkpoint/_backports/filesystem.py``: a file's metadata have under ``DCP_SHARDING_INFO``, as JSON, where
each of its tensors begins in the whole (``saved_offsets``). No file says how large that is: it ends with its parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import is_shape, parse_json
from export_scripts.checkpoints.files.chunked import Chunk, ChunkedTensor
from export_scripts.checkpoints.files.safetensors_file import SafeTensor, read_safetensors
from export_scripts.weights.values import Fields
from handover.errors import CheckpointError
from models.checks import shown
from models.safetensors import read_metadata

PATTERN = "shard-*.safetensors"
"""Names of such files."""
_NOTED, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


def has_parts(archive: Archive) -> bool:
    """Whether there are such files."""
    return any(fnmatchcase(name, PATTERN) for name in archive.sizes)


def read_parted_safetensors(archive: Archive) -> Mapping[str, ChunkedTensor]:
    """List the tensors of all ranks' files, without reading them.

    Raises:
        CheckpointError: a file is damaged, does not say where its tensors belong, or they do not make up a whole.
    """
    parts: dict[str, list[tuple[tuple[int, ...], SafeTensor]]] = {}
    for name in sorted(name for name in archive.sizes if fnmatchcase(name, PATTERN)):
        places = _places(archive, name)
        for key, tensor in read_safetensors(archive, name).items():
            offsets = places.fields(key).sizes(_OFFSETS)
            if len(offsets) != len(tensor.shape) or not is_shape(offsets):
                raise CheckpointError(
                    f"{archive.path}: {name}: {shown(key)} begins at {list(offsets)}", "copy it again"
                )
            parts.setdefault(key, []).append((offsets, tensor))
    return {key: _joined(archive, key, held) for key, held in parts.items()}


def _places(archive: Archive, name: str) -> Fields:
    where = f"{archive.path}: {name}"
    with archive.open(name) as stream:
        noted = read_metadata(stream, archive.sizes[name], where, CheckpointError).get(_NOTED)
    if not isinstance(noted, str):
        raise CheckpointError(f"{where} does not say where its tensors belong ({_NOTED})", "copy it again")
    return Fields(parse_json(noted.encode(), f"{where}: {_NOTED}"), f"{where}: {_NOTED}")


def _joined(archive: Archive, key: str, held: list[tuple[tuple[int, ...], SafeTensor]]) -> ChunkedTensor:
    first = held[0][1]
    if any(len(each.shape) != len(first.shape) or each.data_type != first.data_type for _, each in held):
        raise CheckpointError(f"{archive.path}: the parts of {shown(key)} do not fit together", "copy it again")
    ends = [[start + size for start, size in zip(offsets, each.shape, strict=True)] for offsets, each in held]
    shape = tuple(map(max, zip(*ends, strict=True)))
    chunks = tuple(Chunk(at, each.shape, lambda each=each: each.parts()[0], each.file) for at, each in held)  # type: ignore[misc]
    tensor = ChunkedTensor(key, shape, first.data_type, chunks)
    tensor.check()
    return tensor
