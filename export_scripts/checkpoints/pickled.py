"""Read the pickle inside a torch file without torch and without running anything from it.

``torch.load(weights_only=True)`` needs a file of its own to memory-map; a ``.nemo`` is a tar around the torch
files. So the pickle is read here, with weights_only's rule made stricter: a fixed list of names stands for
descriptors and containers, nothing is ever imported, and every other name is refused. It also keeps the
seconds of importing torch away from the login node.

Format: torch/serialization.py (``_save``) and torch/_utils.py (``_rebuild_tensor_v2``).
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from handover.errors import CheckpointError

_STORAGES = {
    "FloatStorage": "fp32",
    "HalfStorage": "fp16",
    "BFloat16Storage": "bf16",
    "DoubleStorage": "fp64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclass(frozen=True)
class Storage:
    """A run of elements in the torch file.

    Attributes:
        key: name of the record below ``data/``.
        data_type: of its elements.
        element_count: its length.
    """

    key: str
    data_type: str
    element_count: int


@dataclass(frozen=True)
class StoredTensor:
    """A strided view of a storage, as torch describes it; counts are in elements.

    Attributes:
        storage: what it views.
        offset: of its first element.
        shape, stride: per axis.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Unpickler(pickle.Unpickler):
    """An unpickler that knows a fixed list of names and imports none."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint") from None

    def persistent_load(self, pid: Any) -> Storage:
        kind, data_type, key, _location, element_count = pid
        if kind != "storage" or not isinstance(data_type, str):
            raise pickle.UnpicklingError(f"unknown reference {kind!r}")
        return Storage(str(key), data_type, int(element_count))


def _rebuild_tensor(storage: Storage, offset: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    return StoredTensor(storage, int(offset), tuple(int(n) for n in shape), tuple(int(n) for n in stride))


def _rebuild_parameter(tensor: StoredTensor, *_: Any) -> StoredTensor:
    return tensor


def _encode(text: str, encoding: str) -> bytes:
    return text.encode(encoding)


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    # How pickle protocol 2 spells a bytes object, and Transformer Engine its state (`_extra_state`).
    ("_codecs", "encode"): _encode,
    ("_io", "BytesIO"): io.BytesIO,
    ("torch", "Size"): tuple,
}


def read_state(stream: IO[bytes], where: str) -> Mapping[str, Any]:
    """Read a state dictionary; tensors come as StoredTensor, anything else as plain Python.

    Args:
        stream: the record ``data.pkl`` of a torch file.
        where: its place, for the error.

    Raises:
        CheckpointError: the pickle is damaged, holds a name that is not on the list, or is not a dictionary.
    """
    try:
        content = _Unpickler(stream).load()
    except Exception as error:  # a damaged pickle can raise nearly anything, and it is all the same to the user
        raise CheckpointError(
            f"{where} cannot be read: {error}", "only weights are read, as with torch.load(weights_only=True)"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f"{where} is not a dictionary of weights")
    return content
