"""Read the pickle inside a torch file without torch and without running anything from it.

``torch.load(weights_only=True)`` needs a file of its own to memory-map; a ``.nemo`` is a tar around the torch
files. So the pickle is read here, with weights_only's rule made stricter: a fixed list of names stands for
descriptors and containers, nothing is ever imported, and every other name is refused. It also keeps the
seconds of importing torch away from the login node.

The standard library's unpickler in C gives a few bytes of a pickle gigabytes of memory (a place in its memo far away);
the one in Python does not, and its steps can be counted.

Format: torch/serialization.py (``_save``) and torch/_utils.py (``_rebuild_tensor_v2``).
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, ClassVar

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
ITEM_BYTES = {"fp64": 8, "int64": 8, "fp32": 4, "int32": 4, "fp16": 2, "bf16": 2, "int16": 2}
"""Bytes of an element where it is more than one."""
# Of one pickle, whose every step adds at most some 70 bytes. A chunk of a distributed checkpoint takes 130 of them.
_MOST_STEPS = 5_000_000
_SET_STEPS = 4  # the only container that is larger
_TEXT_PER_STEP = 64
_DATA_TYPES = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float64": "fp64",
    **{name: name for name in ("int64", "int32", "int16", "int8", "uint8", "bool")},
}


@dataclass(frozen=True)
class Storage:
    """A run of elements in the torch file.

    Attributes:
        key: name of the record below ``data/``.
        element_count: its length.
    """

    key: str
    data_type: str
    element_count: int


@dataclass(frozen=True)
class StoredTensor:
    """A strided view of a storage, as torch describes it; counts are in elements.

    Attributes:
        offset: of its first element.
        shape, stride: per axis.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Record:
    """What stands for an object whose class is not imported: its attributes, and none of its behaviour.

    Attributes:
        arguments: that it was made with, where it was called.
        state: what was pickled of it; a dictionary's entries are attributes as well.
    """

    def __new__(cls, *_arguments: Any, **_keywords: Any) -> Record:
        """Take any arguments: they are those of the class that is not imported."""
        return super().__new__(cls)

    def __init__(self, *arguments: Any, **_keywords: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        """Keep the attributes; an object with slots gives a pair of dictionaries."""
        self.state = state
        for attributes in state if isinstance(state, tuple) else (state,):
            if isinstance(attributes, dict):
                self.__dict__.update(attributes)


class _Steps(dict[int, Callable[[Any], None]]):
    """What to do at each opcode; each look-up is a step."""

    def __init__(self, methods: Mapping[int, Callable[[Any], None]], most: int) -> None:
        super().__init__(methods)
        self._left = self._most = most

    def __getitem__(self, opcode: int) -> Callable[[Any], None]:
        self.take(1)
        return super().__getitem__(opcode)

    def take(self, count: int) -> None:
        """Count steps; UnpicklingError where they are too many."""
        self._left -= count
        if self._left < 0:
            raise pickle.UnpicklingError(f"it takes more than {self._most:,} steps to read")


class Unpickler(pickle._Unpickler):
    """An unpickler that knows a fixed list of names, imports none, and stops in time.

    Args:
        stream: to read from; it may hold several pickles, one after another.
        records: top-level modules whose objects are read as Record.
        storages: every storage that is referred to is noted here, by key.
        most_steps: that are taken; 0: as many as descriptions of tensors need.

    Attributes:
        METHODS: what to do at each opcode.
    """

    METHODS: ClassVar[Mapping[int, Callable[[Any], None]]]

    def __init__(
        self,
        stream: IO[bytes],
        records: Collection[str] = (),
        storages: dict[str, Storage] | None = None,
        most_steps: int = 0,
    ) -> None:
        super().__init__(stream)
        self._records = records
        self._storages = {} if storages is None else storages
        self.dispatch = self._steps = _Steps(self.METHODS, most_steps or _MOST_STEPS)  # type: ignore[misc]

    def load_copying(self, method: Callable[[Any], None]) -> None:
        """Do a step that may copy what lies on the stack: the arguments of a call, the state of an object."""
        given = self.stack[-1]  # type: ignore[attr-defined]
        self._steps.take(sum(map(_extent, given if isinstance(given, tuple) else (given,))))
        method(self)

    def load_set(self, method: Callable[[Any], None]) -> None:
        """Make a set."""
        self._steps.take(_SET_STEPS)
        method(self)

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name."""
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if module == "torch" and name in _DATA_TYPES:
            return _DATA_TYPES[name]
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module.partition(".")[0] in self._records:
            return Record
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint")

    def persistent_load(self, pid: Any) -> Storage:
        """Return what stands for a storage, which lies elsewhere."""
        kind, data_type, key, _location, element_count, *views = pid
        if kind != "storage" or not isinstance(data_type, str) or any(view is not None for view in views):
            raise pickle.UnpicklingError(f"unknown reference {kind!r}")
        return self._storages.setdefault(str(key), Storage(str(key), data_type, int(element_count)))


def _rebuild_tensor(storage: Storage, offset: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    return StoredTensor(storage, int(offset), tuple(int(n) for n in shape), tuple(int(n) for n in stride))


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":  # that is how bytes are spelled; others may take quadratic time
        raise pickle.UnpicklingError(f"it encodes text as {encoding}")
    return text.encode(encoding)


def _extent(value: Any) -> int:
    """Steps that a copy of a container stands for."""
    if isinstance(value, (str, bytes, bytearray)):
        return len(value) // _TEXT_PER_STEP
    return 1 + len(value) if isinstance(value, (list, tuple, dict, set, frozenset)) else 1


def _methods() -> dict[int, Callable[[Any], None]]:
    """Return the opcodes that torch and megatron-core write; those of old classes and of extensions are left out."""
    methods: dict[int, Callable[[Any], None]] = dict(pickle._Unpickler.dispatch)
    for opcode in (pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEWOBJ_EX):
        del methods[opcode[0]]
    for opcode in (pickle.REDUCE, pickle.NEWOBJ, pickle.BUILD):
        methods[opcode[0]] = partial(Unpickler.load_copying, method=methods[opcode[0]])
    for opcode in (pickle.EMPTY_SET, pickle.FROZENSET):
        methods[opcode[0]] = partial(Unpickler.load_set, method=methods[opcode[0]])
    return methods


Unpickler.METHODS = _methods()


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): lambda *_: {},
    ("builtins", "set"): set,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    # How pickle protocol 2 spells a bytes object, and Transformer Engine its state (`_extra_state`).
    ("_codecs", "encode"): _encode,
    ("_io", "BytesIO"): io.BytesIO,
    ("torch", "Size"): tuple,
}


def unpickle(
    stream: IO[bytes],
    where: str,
    records: Collection[str] = (),
    storages: dict[str, Storage] | None = None,
    most_steps: int = 0,
    reader: type[Unpickler] = Unpickler,
) -> Any:
    """Read one pickle; tensors come as StoredTensor.

    Args:
        stream: the pickle; what follows it is not read.
        where: its place, for the error.
        records: top-level modules whose objects are read as Record.
        storages: every storage that is referred to is noted here, by key.
        most_steps: see Unpickler.
        reader: the unpickler.

    Raises:
        CheckpointError: it is damaged or holds a name that is not on the list.
    """
    try:
        return reader(stream, records, storages, most_steps).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly anything, and it is all the same to the user
        raise CheckpointError(
            f"{where} cannot be read: {error}", "only weights are read, as with torch.load(weights_only=True)"
        ) from error


def as_state(content: Any, where: str) -> Mapping[str, Any]:
    """Take a state dictionary out of what a checkpoint holds.

    Raises:
        CheckpointError: it is not a dictionary.
    """
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f"{where} is not a dictionary of weights")
    return content
