"""Tensors of a safetensors file, mapped in place.

Format: https://github.com/huggingface/safetensors, "Format": eight bytes with the header's length, a JSON object with
type, shape and begin and end of each tensor's bytes, then these bytes without holes, row-major, little-endian.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.bounded import parse_json
from export_scripts.conversion.dtypes import STORAGE, Array
from export_scripts.conversion.mapped import map_record
from export_scripts.weights.values import Fields, shown
from handover.errors import CheckpointError

_LENGTH_BYTES = 8
# The format allows 100 MB. A quarter of it has room for 200,000 tensors, and parsed it takes some 500 MB.
_LARGEST_HEADER_BYTES = 25_000_000
_METADATA = "__metadata__"
# The format's name of a type: ours, and bytes of an element. What is no weight keeps the format's name.
_TYPES = {"F32": ("fp32", 4), "F16": ("fp16", 2), "BF16": ("bf16", 2), "F64": ("fp64", 8), "BOOL": ("bool", 1)}
_OTHER_BYTES = {"I8": 1, "U8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}


@dataclass(frozen=True)
class SafeTensor:
    """One tensor of a safetensors file.

    Attributes:
        archive, file: where it lies.
        offset: of its first byte in the file.
        shape: per axis.
        data_type: fp32, fp16, bf16 or another name.
        axis: always None; the tensor is in one part.
    """

    archive: Archive
    file: str
    offset: int
    shape: tuple[int, ...]
    data_type: str
    axis: int | None = None

    @property
    def unproved(self) -> tuple[str, ...]:
        """The file: the format has no checksums."""
        return (self.file,)

    def parts(self) -> tuple[Array, ...]:
        """Map the tensor, read-only; bf16 comes as uint16."""
        dtype = STORAGE[self.data_type]
        if 0 in self.shape:
            return (np.empty(self.shape, dtype),)
        extent = self.archive.extent(self.file)
        record = map_record(extent.path, extent.offset + self.offset, prod(self.shape) * dtype.itemsize)
        return (record.view(dtype).reshape(self.shape),)


def read_safetensors(archive: Archive, name: str) -> Mapping[str, SafeTensor]:
    """List a file's tensors without reading them.

    Raises:
        CheckpointError: it is truncated, damaged, or no safetensors file.
    """
    where, size_bytes = f"{archive.path}: {name}", archive.sizes[name]
    with archive.open(name) as stream:
        header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 2 <= header_bytes <= min(_LARGEST_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
            raise CheckpointError(f"{where} is truncated or no safetensors file", "copy it again")
        content = stream.read(header_bytes)
    header = {key: value for key, value in Fields(parse_json(content, where), where).items() if key != _METADATA}
    fields = {key: Fields(entry, f"{where}: {shown(key)}") for key, entry in header.items()}
    tensors = {key: _tensor(archive, name, _LENGTH_BYTES + header_bytes, entry) for key, entry in fields.items()}
    spans = sorted(_span(entry) for entry in fields.values())
    ends = [0, *(end for _, end in spans)]
    if [begin for begin, _ in spans] != ends[:-1] or ends[-1] != size_bytes - _LENGTH_BYTES - header_bytes:
        raise CheckpointError(f"{where} is truncated, or its tensors overlap", "copy the checkpoint again")
    return tensors


def _tensor(archive: Archive, file: str, base: int, entry: Fields) -> SafeTensor:
    """Describe one tensor; CheckpointError where its bytes are not those of its type and shape."""
    kind, shape, (begin, end) = entry.text("dtype"), entry.sizes("shape"), _span(entry)
    data_type, item_bytes = _TYPES.get(kind) or (kind, _OTHER_BYTES.get(kind, 0))
    if item_bytes and end - begin != item_bytes * prod(shape):
        raise CheckpointError(
            f"{archive.path}: {file} has a damaged header: {end - begin} bytes for {shown(kind)} {shown(list(shape))}",
            "copy the checkpoint again",
        )
    return SafeTensor(archive, file, base + begin, shape, data_type)


def _span(entry: Fields) -> tuple[int, int]:
    begin, end = (*entry.sizes("data_offsets"), 0, 0)[:2]
    return begin, end
