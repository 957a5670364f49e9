"""Distributed checkpoints of torch (``torch_dist``): ``.metadata`` says which bytes of which ``.distcp`` file are what.

Format: torch, ``distributed/checkpoint/{metadata,filesystem}.py``; megatron-core,
``dist_checkpointing/strategies/torch.py``. A chunk is a whole file of torch.save within a ``.distcp`` file; its tensor
is mapped in place. The metadata's classes are not imported: their objects are read as plain records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from export_scripts.checkpoints.files.archive import Archive, Extent
from export_scripts.checkpoints.files.bounded import is_shape
from export_scripts.checkpoints.files.chunked import Chunk, ChunkedTensor
from export_scripts.checkpoints.files.pickled import Record, StoredTensor, unpickle
from export_scripts.checkpoints.files.torch_file import TorchFile
from export_scripts.dtypes import Array
from handover.errors import CheckpointError

METADATA_FILE = ".metadata"
_RECORDS = ("torch", "megatron", "pathlib")
_ROOT = "tensor"


def read_torch_dist(archive: Archive, folder: str) -> tuple[dict[str, ChunkedTensor], tuple[str, ...]]:
    """List the tensors below a folder and the keys that are no tensors; only the metadata are read.

    Args:
        archive: the files.
        folder: of the checkpoint within them, with a slash at its end.

    Raises:
        CheckpointError: the metadata are damaged, or name files or bytes that are not there.
    """
    where = f"{archive.path}: {folder}{METADATA_FILE}"
    with archive.open(folder + METADATA_FILE) as stream:
        metadata = unpickle(stream, where, _RECORDS)
    try:
        places = {_place(index): info for index, info in metadata.storage_data.items()}
        entries = dict(metadata.state_dict_metadata)
        tensors = {
            str(key): _tensor(archive, folder, str(key), entry, places)
            for key, entry in entries.items()
            if hasattr(entry, "chunks")
        }
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        raise CheckpointError(
            f"{where} is not a checkpoint's metadata ({error})", "copy the checkpoint again"
        ) from error
    return tensors, tuple(str(key) for key in entries if key not in tensors)


def _place(index: Record) -> tuple[str, tuple[int, ...] | None]:
    offset = index.__dict__.get("offset")
    return str(index.__dict__["fqn"]), None if offset is None else tuple(offset)


def _tensor(
    archive: Archive, folder: str, key: str, entry: Any, places: Mapping[tuple[str, tuple[int, ...] | None], Any]
) -> ChunkedTensor:
    chunks, shape = [], tuple(map(int, entry.size))
    if not is_shape(shape):
        raise ValueError(f"the shape of {key} cannot be")
    for described in entry.chunks:
        offsets, sizes = tuple(map(int, described.offsets)), tuple(map(int, described.sizes))
        extent_of = _stored(archive, folder, key, places[key, offsets])
        chunks.append(Chunk(offsets, sizes, _reader(archive, key, sizes, *extent_of)))
        if not is_shape(offsets) or not is_shape(sizes) or len(offsets) != len(shape) != len(sizes):
            raise ValueError(f"a chunk of {key} cannot be")
    return ChunkedTensor(key, shape, _data_type(entry.properties), tuple(chunks))


def _data_type(properties: Any) -> str:
    """Read torch's TensorProperties, which are pickled as a tuple that begins with the data type."""
    return str(properties.dtype if hasattr(properties, "dtype") else properties.state[0])


def _stored(archive: Archive, folder: str, key: str, info: Any) -> tuple[str, int, int]:
    """Name the file and the bytes of a chunk; both must be there."""
    name, offset, length = f"{folder}{info.relative_path}", int(info.offset), int(info.length)
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{archive.path}: {key} is stored through {info.transform_descriptors}, which is not read"
        )
    if name not in archive or offset < 0 or length < 0 or offset + length > archive.sizes[name]:
        raise CheckpointError(f"{archive.path}: {key} is not within {name}", "copy the checkpoint again")
    return name, offset, length


def _reader(archive: Archive, key: str, sizes: tuple[int, ...], name: str, offset: int, length: int) -> Any:
    def read() -> Array:
        beneath = archive.extent(name)
        chunk = Archive(archive.path, {key: Extent(beneath.path, beneath.offset + offset, length)})
        file = TorchFile(chunk, key, _root)
        tensor = file.state[_ROOT]
        if not isinstance(tensor, StoredTensor) or tensor.shape != sizes:
            raise CheckpointError(f"{archive.path}: {key} holds no chunk of {list(sizes)}", "copy the checkpoint again")
        return file.read(tensor)

    return read


def _root(content: Any, where: str) -> Mapping[str, Any]:
    return {_ROOT: content}
