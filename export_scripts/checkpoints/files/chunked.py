"""Tensors of distributed checkpoints: an array in chunks, each of which lies somewhere of its own.

megatron-core keeps the tensors of all layers as one array [layers, ...] under a key without a number; here each layer
is a tensor again. Nothing is read before it is asked for, and one tensor at a time.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any, overload

import numpy as np

from export_scripts.checkpoints.files.rank_files import JoinAxis
from export_scripts.tensors.array_of_pieces import array_of
from export_scripts.tensors.dtypes import STORAGE, Array
from ft_format.layout import MOST_LAYERS
from handover.errors import CheckpointError

# The optimizer's tensors have shapes of their own; they are ignored by name.
_TRAINING_STATE = ("optimizer.", "chained_")
_KEPT = 8  # chunks that stay mapped where they are read piece by piece
_LARGEST = 1 << 62  # of an axis: sums of two are whole numbers of 64 bits
_STACKED = re.compile(r"(?:^|\.)layers\.(?!\d+\.)")


@dataclass(frozen=True)
class Chunk:
    """One piece of an array.

    Attributes:
        offsets, sizes: where it lies in the array, per axis.
        read: maps it.
        unproved: the file that holds it without a checksum of its bytes; empty: there is one.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    read: Callable[[], Array]
    unproved: str = ""


class ChunkTable(Sequence[Chunk]):
    """Chunks that are kept as numbers: there may be hundreds of thousands in a checkpoint. Each has a checksum."""

    __slots__ = ()

    @abstractmethod
    def corners(self) -> tuple[Array, Array]:
        """Return where they lie in the array, [chunk, axis], and their sizes."""

    @abstractmethod
    def map(self, number: int, sizes: tuple[int, ...]) -> Array:
        """Map one."""

    @overload
    def __getitem__(self, number: int) -> Chunk: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, number: int | slice) -> Chunk | Sequence[Chunk]:
        offsets, sizes = self.corners()
        if isinstance(number, slice):
            return [self._chunk(each, offsets, sizes) for each in range(*number.indices(len(self)))]
        return self._chunk(number, offsets, sizes)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self[:])

    def _chunk(self, number: int, offsets: Array, sizes: Array) -> Chunk:
        own = tuple(sizes[number].tolist())
        return Chunk(tuple(offsets[number].tolist()), own, partial(self.map, number, own))


@dataclass(frozen=True, slots=True)
class ChunkedTensor:
    """A tensor in chunks. They make up the whole whichever ranks wrote them, so that it is in one part.

    Attributes:
        key: for errors.
        data_type: fp32, fp16, bf16, or another name.
        axis: always None.
        part_count: always 1.
    """

    key: str
    shape: tuple[int, ...]
    data_type: str
    chunks: Sequence[Chunk]
    axis: int | None = None
    part_count: int = 1

    @property
    def unproved(self) -> tuple[str, ...]:
        """Files that hold it without a checksum of its bytes."""
        if isinstance(self.chunks, ChunkTable):
            return ()
        return tuple(chunk.unproved for chunk in self.chunks if chunk.unproved)

    def parts(self) -> tuple[Array, ...]:
        """Describe the whole by the chunks, each of which is mapped when it is read."""
        chunks = self.chunks
        if len(chunks) == 1:
            return (chunks[0].read(),)

        @lru_cache(_KEPT)
        def take(number: int) -> Array:
            return chunks[number].read()

        return (array_of(self.shape, STORAGE[self.data_type], *self._corners(), take),)

    def _corners(self) -> tuple[Array, Array]:
        """Return where the chunks lie, [chunk, axis], and their sizes."""
        if isinstance(self.chunks, ChunkTable):
            return self.chunks.corners()
        corners = ([chunk.offsets for chunk in self.chunks], [chunk.sizes for chunk in self.chunks])
        low, sizes = (np.array(each, np.int64).reshape(len(self.chunks), len(self.shape)) for each in corners)
        return low, sizes

    def check(self) -> None:
        """Refuse chunks that leave a hole, overlap or reach beyond the whole; CheckpointError."""
        low, sizes = self._corners()
        is_inside = all(full <= _LARGEST for full in self.shape) and bool(
            (sizes <= self.shape).all() and (low <= np.array(self.shape, np.int64) - sizes).all()
        )
        total = sum(map(prod, sizes.tolist())) if is_inside else 0
        if not is_inside or total != prod(self.shape) or _overlap(low, low + sizes):
            raise CheckpointError(
                f"{self.key}: its chunks do not make up {list(self.shape)}", "copy the checkpoint again"
            )


def _overlap(low: Array, high: Array) -> bool:
    """Whether two chunks have an element in common."""
    return any(((low < end) & (start < high)).all(1).sum() > 1 for start, end in zip(low, high, strict=True))


class ChunkedState:
    """The state of a model in a distributed checkpoint.

    Args:
        tensors: by key, as stored.
        other_keys: keys whose values are not tensors.
        rename: from a stored key to the table's.
        objects: what reads the values of these keys, where they can be read.
    """

    def __init__(
        self,
        tensors: Mapping[str, ChunkedTensor],
        other_keys: tuple[str, ...],
        rename: Callable[[str], str] = str,
        objects: Mapping[str, Callable[[], Any]] | None = None,
    ) -> None:
        self.objects = objects or {}
        self._tensors: dict[str, ChunkedTensor] = {}
        for key, tensor in tensors.items():
            if _STACKED.search(key) and not key.startswith(_TRAINING_STATE):
                self._tensors |= _layers(rename(key), tensor)
            else:
                self._tensors[rename(key)] = tensor
        self._other_keys = tuple(rename(key) for key in other_keys)

    def keys(self) -> tuple[str, ...]:
        """Every key, layers numbered."""
        return tuple(self._tensors)

    def other_keys(self) -> tuple[str, ...]:
        """Keys whose values are not tensors."""
        return self._other_keys

    def cut_rows(self, sections_of: Callable[[str, tuple[int, ...]], Mapping[str, int]]) -> None:
        """Take tensors apart by rows.

        Args:
            sections_of: the rows of each part by its key, given a tensor's key and shape; none: it stays whole.
        """
        found: dict[str, ChunkedTensor] = {}
        for key, tensor in self._tensors.items():
            sections = {} if key.startswith(_TRAINING_STATE) else sections_of(key, tensor.shape)
            found |= _rows_apart(tensor, sections) if sections else {key: tensor}
        self._tensors = found

    def copies(self, join_axis: JoinAxis) -> Iterator[tuple[str, ChunkedTensor, ChunkedTensor]]:
        """List what ``tensors`` leaves out as a copy: nothing, each tensor is stored once."""
        return iter(())

    def tensors(self, join_axis: JoinAxis) -> Mapping[str, ChunkedTensor]:
        """Tensors by key, not read yet; where training cut them, their chunks say.

        Raises:
            CheckpointError: a tensor's chunks do not make it up.
        """
        for key, tensor in self._tensors.items():
            if not key.startswith(_TRAINING_STATE):
                tensor.check()
        return self._tensors


def _layers(key: str, stacked: ChunkedTensor) -> dict[str, ChunkedTensor]:
    """Take an array [layers, ...] apart."""
    before, _, after = key.partition("layers.")
    if stacked.shape and stacked.shape[0] > MOST_LAYERS:
        raise CheckpointError(f"{stacked.key}: {stacked.shape[0]} layers are more than a model has")
    return {f"{before}layers.{layer}.{after}": each for layer, each in enumerate(taken_apart(stacked))}


def taken_apart(stacked: ChunkedTensor) -> tuple[ChunkedTensor, ...]:
    """Take an array apart along its first axis."""
    chunks: list[list[Chunk]] = [[] for _ in range(stacked.shape[0] if stacked.shape else 0)]
    for chunk in stacked.chunks:
        for place in range(chunk.offsets[0], min(chunk.offsets[0] + chunk.sizes[0], len(chunks))):
            chunks[place].append(_layer_of(chunk, place))
    return tuple(
        ChunkedTensor(f"{stacked.key}[{place}]", stacked.shape[1:], stacked.data_type, tuple(own))
        for place, own in enumerate(chunks)
    )


def _rows_apart(whole: ChunkedTensor, sections: Mapping[str, int]) -> dict[str, ChunkedTensor]:
    """Take an array apart into runs of rows, given how many each has by its key."""
    found, start = dict[str, ChunkedTensor](), 0
    for key, count in sections.items():
        chunks = tuple(part for chunk in whole.chunks if (part := _rows_of(chunk, start, start + count)))
        found[key] = replace(whole, key=key, shape=(count, *whole.shape[1:]), chunks=chunks)
        start += count
    return found


def _rows_of(chunk: Chunk, start: int, stop: int) -> Chunk | None:
    """Keep what of a chunk lies in some rows; None: nothing does."""
    own = chunk.offsets[0]
    low, high = max(start, own), min(stop, own + chunk.sizes[0])
    if low >= high:
        return None
    offsets, sizes = (low - start, *chunk.offsets[1:]), (high - low, *chunk.sizes[1:])
    return Chunk(offsets, sizes, lambda: chunk.read()[low - own : high - own], chunk.unproved)


def _layer_of(chunk: Chunk, layer: int) -> Chunk:
    return Chunk(chunk.offsets[1:], chunk.sizes[1:], lambda: chunk.read()[layer - chunk.offsets[0]], chunk.unproved)
