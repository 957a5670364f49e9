"""What a safetensors file says of its tensors; a header that cannot be true is refused.

Format: https://github.com/huggingface/safetensors, "Format": eight bytes with the header's length, a JSON object with
type, shape and begin and end of each tensor's bytes, then these bytes without holes, row-major, little-endian.
"""

from __future__ import annotations

import json
import reprlib
import struct
from collections.abc import Mapping
from math import prod
from typing import IO, Any, NamedTuple

from models.checks import Refusal

_LENGTH_BYTES = 8
# The format allows 100 MB. A quarter of it has room for 200,000 tensors, and parsed it takes some 500 MB.
_LARGEST_HEADER_BYTES = 25_000_000
_MOST_AXES, _MOST = 16, 1 << 48
_METADATA = "__metadata__"
# The format's name of a type: ours, and bytes of an element. What is no weight by itself keeps the format's name.
_TYPES = {"F32": ("fp32", 4), "F16": ("fp16", 2), "BF16": ("bf16", 2), "F64": ("fp64", 8), "BOOL": ("bool", 1)}
_OTHER_BYTES = {
    **dict.fromkeys(("I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **{"I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8},
}


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file.

    Attributes:
        data_type: fp32, fp16, bf16 or another name.
        shape: per axis.
        offset: of its first byte in the file.
        size_bytes: of its content.
    """

    data_type: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def read_header(stream: IO[bytes], size_bytes: int, where: str, error: Refusal) -> dict[str, StoredTensor]:
    """List a file's tensors by name.

    Args:
        stream: the file, at its beginning.
        size_bytes: of the file.
        where: the file, for errors.
        error: makes the exception for a file that is truncated, damaged, or no safetensors file.
    """
    content, base = _header(stream, size_bytes, where, error)
    content.pop(_METADATA, None)
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # equal ones are one
    tensors = {key: _tensor(base, entry, f"{where}: {key[:200]}", error) for key, entry in content.items()}
    tensors = {key: each._replace(shape=shapes.setdefault(each.shape, each.shape)) for key, each in tensors.items()}
    end = base
    for tensor in sorted(tensors.values(), key=lambda each: (each.offset, each.size_bytes)):
        if tensor.offset != end:
            break
        end += tensor.size_bytes
    else:
        if end == size_bytes:
            return tensors
    raise error(f"{where} is truncated, or its tensors overlap", "copy the checkpoint again")


def read_metadata(stream: IO[bytes], size_bytes: int, where: str, error: Refusal) -> Mapping[str, Any]:
    """Read what a file's writer noted in it; arguments as for ``read_header``."""
    noted = _header(stream, size_bytes, where, error)[0].get(_METADATA)
    return noted if isinstance(noted, Mapping) else {}


def _header(stream: IO[bytes], size_bytes: int, where: str, error: Refusal) -> tuple[dict[str, Any], int]:
    """Read a file's header, and where its tensors' bytes begin."""
    header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
    if not 2 <= header_bytes <= min(_LARGEST_HEADER_BYTES, size_bytes - _LENGTH_BYTES):
        raise error(f"{where} is truncated or no safetensors file", "copy it again")
    content = parse_json(stream.read(header_bytes), where, error)
    if not isinstance(content, dict):
        raise error(f"{where}: the header is no JSON object", "copy it again")
    return content, _LENGTH_BYTES + header_bytes


def _tensor(base: int, entry: Any, where: str, error: Refusal) -> StoredTensor:
    """Read one tensor's entry; refused where its bytes are not those of its type and shape."""
    if not isinstance(entry, Mapping) or not isinstance(kind := entry.get("dtype"), str):
        raise error(f"{where} is {reprlib.repr(entry)}, without a dtype", "copy the checkpoint again")
    shape, span = (_sizes(entry.get(key)) for key in ("shape", "data_offsets"))
    if shape is None or span is None or len(span) != 2:
        raise error(f"{where} has no shape and data_offsets that are sizes", "copy the checkpoint again")
    data_type, item_bytes = _TYPES.get(kind) or (kind, _OTHER_BYTES.get(kind, 0))
    size_bytes = span[1] - span[0]
    if size_bytes < 0 or (item_bytes and size_bytes != item_bytes * prod(shape)):
        problem = f"{where} has a damaged header: {size_bytes} bytes for {kind[:200]} {list(shape)}"
        raise error(problem, "copy the checkpoint again")
    return StoredTensor(data_type, shape, base + span[0], size_bytes)


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Take a list of a few whole numbers that can be multiplied and counted in; None: it is none."""
    if not isinstance(value, list) or len(value) > _MOST_AXES:
        return None
    is_legal = all(type(each) is int and 0 <= each < _MOST for each in value)
    return tuple(value) if is_legal else None


def parse_json(content: bytes, where: str, error: Refusal) -> Any:
    """Parse JSON out of a checkpoint; it is refused if it is none, nested without end, or has a key twice."""
    try:
        return json.loads(content, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as problem:
        raise error(f"{where} is not JSON: {problem}", "") from problem


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return result


def number_of(content: bytes, data_type: str) -> float:
    """Return the one number that a tensor of fp32, fp16 or bf16 has."""
    content, kind = (
        (b"\0\0" + content, "f") if data_type == "bf16" else (content, {"fp32": "f", "fp16": "e"}[data_type])
    )
    return float(struct.unpack(f"<{kind}", content)[0])
