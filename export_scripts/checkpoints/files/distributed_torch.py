"""Distributed checkpoints of torch (``torch_dist``): ``.metadata`` says which bytes of which ``.distcp`` file are what.

Format: torch, ``distributed/checkpoint/{metadata,filesystem}.py``; megatron-core,
``dist_checkpointing/strategies/torch.py``. A chunk is a whole file of torch.save within a ``.distcp`` file; its tensor
is mapped in place. The metadata's classes are not imported: their objects are read as plain records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from export_scripts.checkpoints.files.archive import Archive, Extent
from export_scripts.checkpoints.files.chunked import Chunk, ChunkedTensor
from export_scripts.checkpoints.files.pickled import Record, StoredTensor, unpickle
from export_scripts.checkpoints.files.torch_file import TorchFile
from export_scripts.checkpoints.files.torch_format import open_torch_file
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.values import Fields, entries
from handover.errors import CheckpointError
from models.checks import shown

METADATA_FILE = ".metadata"
_MOST_STEPS = 12_000_000
"""Of its pickle. A trillion parameters in 70,000 chunks take 9 million."""
# Modules whose objects training leaves beside the weights: arguments, callbacks, schedules. None is imported.
TRAINING_MODULES = (
    *("argparse", "apex", "collections", "datetime", "enum", "fp16", "lightning", "megatron", "nemo", "nemo_run"),
    *("numpy", "omegaconf", "pathlib", "pytorch_lightning", "torch", "transformer_engine"),
)
_RECORDS = ("torch", "megatron", "pathlib")
_ROOT = "tensor"


@dataclass(frozen=True)
class TorchDist:
    """What a folder holds; only the metadata are read.

    Attributes:
        tensors: by key.
        objects: what reads the value of each key that is no tensor.
        paths: how keys of nested dictionaries came about, where torch flattened them.
    """

    tensors: Mapping[str, ChunkedTensor]
    objects: Mapping[str, Callable[[], Any]]
    paths: Mapping[str, tuple[Any, ...]]


def read_torch_dist(archive: Archive, folder: str) -> TorchDist:
    """Read the metadata of a folder.

    Args:
        archive: the files.
        folder: of the checkpoint within them, with a slash at its end.

    Raises:
        CheckpointError: the metadata are damaged, or name files or bytes that are not there.
    """
    where = f"{archive.path}: {folder}{METADATA_FILE}"
    with archive.open(folder + METADATA_FILE) as stream:
        metadata = unpickle(stream, where, _RECORDS, most_steps=_MOST_STEPS)
    fields = _fields(metadata, where)
    places = {_place(index, where): _fields(info, where) for index, info in fields.fields("storage_data").items()}
    described = fields.fields("state_dict_metadata")
    tensors = {
        str(key): _tensor(archive, folder, str(key), _fields(entry, f"{where}: {shown(str(key))}"), places)
        for key, entry in described.items()
        if hasattr(entry, "chunks")
    }
    others = [str(key) for key in described if str(key) not in tensors]
    paths = fields.get("planner_data")
    return TorchDist(
        tensors,
        {key: _object_reader(archive, folder, key, places, where) for key in others},
        {str(key): path for key, path in paths.items() if isinstance(path, tuple)} if isinstance(paths, dict) else {},
    )


def _fields(record: Any, where: str) -> Fields:
    """Take the attributes of an object that was read as a record; CheckpointError where it is none."""
    return Fields(vars(record) if isinstance(record, Record) else record, where)


def _place(index: Any, where: str) -> tuple[str, tuple[int, ...] | None]:
    """Read torch's MetadataIndex: a tensor and where its chunk begins."""
    fields = _fields(index, where)
    return str(fields.get("fqn")), None if fields.get("offset") is None else fields.sizes("offset")


def _tensor(
    archive: Archive, folder: str, key: str, entry: Fields, places: Mapping[tuple[str, tuple[int, ...] | None], Fields]
) -> ChunkedTensor:
    where = f"{archive.path}: {folder}{METADATA_FILE}: {shown(key)}"
    chunks, shape = [], entry.sizes("size")
    for described in entry.entries("chunks"):
        chunk = _fields(described, where)
        offsets, sizes = chunk.sizes("offsets"), chunk.sizes("sizes")
        if 0 in sizes and 0 not in shape:
            continue  # of a rank that had no rows left
        if not len(offsets) == len(shape) == len(sizes) or (key, offsets) not in places:
            raise CheckpointError(f"{where} has a chunk at {list(offsets)} that lies nowhere", "copy it again")
        extent_of = _stored(archive, folder, key, places[key, offsets])
        chunks.append(Chunk(offsets, sizes, _reader(archive, key, sizes, *extent_of)))
    return ChunkedTensor(key, shape, _data_type(entry.get("properties"), where), tuple(chunks))


def _data_type(properties: Any, where: str) -> str:
    """Read torch's TensorProperties, which are pickled as a tuple that begins with the data type."""
    if isinstance(properties, Record) and "dtype" not in vars(properties):
        state = entries(getattr(properties, "state", None), f"{where}: properties")
        return str(state[0]) if state else ""
    return str(_fields(properties, f"{where}: properties").get("dtype"))


def _stored(archive: Archive, folder: str, key: str, info: Fields) -> tuple[str, int, int]:
    """Name the file and the bytes of a chunk; both must be there."""
    name, offset, length = f"{folder}{info.text('relative_path')}", info.whole("offset"), info.whole("length")
    if transforms := info.get("transform_descriptors"):
        raise CheckpointError(f"{archive.path}: {key} is stored through {shown(transforms)}, which is not read")
    if name not in archive or offset + length > archive.sizes[name]:
        raise CheckpointError(f"{archive.path}: {key} is not within {name}", "copy the checkpoint again")
    return name, offset, length


def _within(archive: Archive, key: str, name: str, offset: int, length: int) -> Archive:
    """Show a run of a file's bytes as a file of its own."""
    beneath = archive.extent(name)
    return Archive(archive.path, {key: Extent(beneath.path, beneath.offset + offset, length)})


def _object_reader(
    archive: Archive, folder: str, key: str, places: Mapping[tuple[str, tuple[int, ...] | None], Fields], where: str
) -> Callable[[], Any]:
    def read() -> Any:
        if (key, None) not in places:
            raise CheckpointError(f"{where}: {shown(key)} lies nowhere", "copy the checkpoint again")
        within = _within(archive, key, *_stored(archive, folder, key, places[key, None]))
        return open_torch_file(within, key, _root, TRAINING_MODULES).state[_ROOT]

    return read


def _reader(archive: Archive, key: str, sizes: tuple[int, ...], name: str, offset: int, length: int) -> Any:
    def read() -> Array:
        file = TorchFile(_within(archive, key, name, offset, length), key, _root)
        tensor = file.state[_ROOT]
        if not isinstance(tensor, StoredTensor) or tensor.shape != sizes:
            raise CheckpointError(f"{archive.path}: {key} holds no chunk of {list(sizes)}", "copy the checkpoint again")
        return file.read(tensor)

    return read


def _root(content: Any, where: str) -> Mapping[str, Any]:
    return {_ROOT: content}
