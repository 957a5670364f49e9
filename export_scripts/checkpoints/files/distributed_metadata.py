"""Read ``.metadata`` of torch's distributed checkpoints, which may describe hundreds of thousands of chunks.

What stands for torch's objects has their fields alone, equal shapes are one tuple, and what pickle keeps because a
later step might refer to it is forgotten where none does: states of objects, and arguments of calls.
"""

from __future__ import annotations

import pickle
from typing import IO, Any

from export_scripts.checkpoints.files.archive import Archive
from export_scripts.checkpoints.files.pickled import Unpickler, unpickle

METADATA_FILE = ".metadata"
_MOST_STEPS, _SURE_STEPS, _BYTES_OF_A_STEP = 60_000_000, 12_000_000, 1 << 18
"""Of its pickle. A trillion parameters in 70,000 chunks take 9 million, with an optimizer's states four times that."""
_RECORDS = ("torch", "megatron", "pathlib")


class Kept:
    """An object of torch: its fields that are wanted."""

    __slots__: tuple[str, ...] = ()

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise pickle.UnpicklingError(f"the state of {type(self).__name__} is no dictionary")
        for name in type(self).__slots__:
            setattr(self, name, state.get(name))


class Index(Kept):
    """``MetadataIndex``: a tensor and where its chunk begins; an object has no place."""

    __slots__ = ("fqn", "offset")
    fqn: Any
    offset: Any

    def __hash__(self) -> int:
        return hash((self.fqn, self.offset))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Index) and (self.fqn, self.offset) == (other.fqn, other.offset)

    @classmethod
    def of(cls, key: str, offsets: tuple[int, ...] | None) -> Index:
        """Make one."""
        index = cls()
        index.fqn, index.offset = key, offsets
        return index


class Stored(Kept):
    """``_StorageInfo``: a file, and which of its bytes."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")
    length: Any
    offset: Any
    relative_path: Any
    transform_descriptors: Any


class ChunkPlace(Kept):
    """``ChunkStorageMetadata``: where a chunk lies in its tensor."""

    __slots__ = ("offsets", "sizes")
    offsets: Any
    sizes: Any


class Described(Kept):
    """``TensorStorageMetadata``: a tensor."""

    __slots__ = ("chunks", "properties", "size")
    chunks: Any
    properties: Any
    size: Any


class Properties(Kept):
    """``TensorProperties``, which are pickled as a tuple that begins with the data type."""

    __slots__ = ("dtype",)
    dtype: Any

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and state:
            self.dtype = state[0]
        else:
            super().__setstate__(state)


_KINDS = {
    "MetadataIndex": Index,
    "_StorageInfo": Stored,
    "ChunkStorageMetadata": ChunkPlace,
    "TensorStorageMetadata": Described,
    "TensorProperties": Properties,
}


class _Remembered(list[Any]):
    """What later steps may refer to; its numbers follow one another, as those of every pickler."""

    def __setitem__(self, number: Any, value: Any) -> None:
        if number == len(self):
            self.append(value)
        else:
            super().__setitem__(number, value)


class _MetadataUnpickler(Unpickler):
    """Reads the metadata alone."""

    def __init__(self, stream: IO[bytes], *arguments: Any) -> None:
        super().__init__(stream, *arguments)
        self.memo: Any = _Remembered()
        self._shapes: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._states: dict[int, int] = {}  # dictionaries that may be one, and their numbers

    def find_class(self, module: str, name: str) -> Any:
        if name in _KINDS and module.startswith("torch.distributed."):
            return _KINDS[name]
        return super().find_class(module, name)

    def load_remembered(self) -> None:
        """Remember what is on top of the stack."""
        value = self.stack[-1]  # type: ignore[attr-defined]
        if type(value) is dict:
            self._states[id(value)] = len(self.memo)
        self.memo.append(value)

    def load_state(self) -> None:
        """Set an object's state, and forget that."""
        state = self.stack[-1]  # type: ignore[attr-defined]
        super().METHODS[pickle.BUILD[0]](self)
        if (place := self._states.pop(id(state), None)) is not None:
            self.memo[place] = None

    def load_shape(self) -> None:
        """Do a call; where it made a shape, take the equal one that is there, and forget its arguments."""
        given = self.stack[-1]  # type: ignore[attr-defined]
        super().METHODS[pickle.REDUCE[0]](self)
        made = self.stack[-1]  # type: ignore[attr-defined]
        if isinstance(made, tuple) and isinstance(given, tuple):
            self.stack[-1] = shape = self._shapes.setdefault(made, made)  # type: ignore[attr-defined]
            for place in range(-min(2, len(self.memo)), 0):
                if self.memo[place] is given or self.memo[place] is made:
                    self.memo[place] = shape

    METHODS = {
        **Unpickler.METHODS,
        pickle.MEMOIZE[0]: load_remembered,
        pickle.BUILD[0]: load_state,
        pickle.REDUCE[0]: load_shape,
    }


def read_metadata(archive: Archive, folder: str, where: str) -> Any:
    """Read the metadata of a folder.

    Args:
        archive: the files.
        folder: of the checkpoint within them, with a slash at its end.
        where: the file's place, for the error.

    Raises:
        CheckpointError: they are damaged, hold foreign objects, or describe more than there is room for in the files.
    """
    most = min(_MOST_STEPS, _SURE_STEPS + sum(archive.sizes.values()) // _BYTES_OF_A_STEP)
    with archive.open(folder + METADATA_FILE) as stream:
        return unpickle(stream, where, _RECORDS, most_steps=most, reader=_MetadataUnpickler)
