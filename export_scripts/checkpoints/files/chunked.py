"""Tensors of distributed checkpoints: an array in chunks, each of which lies somewhere of its own.

megatron-core keeps the tensors of all layers as one array [layers, ...] under a key without a number; here each layer
is a tensor again. Nothing is read before it is asked for, and one tensor at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from export_scripts.checkpoints.files.rank_files import JoinAxis
from export_scripts.tensors.array_of_pieces import array_of_pieces
from export_scripts.tensors.dtypes import STORAGE, Array
from ft_format.layout import MOST_LAYERS
from handover.errors import CheckpointError

# The optimizer's tensors have shapes of their own; they are ignored by name.
_TRAINING_STATE = ("optimizer.", "chained_")
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


@dataclass(frozen=True)
class ChunkedTensor:
    """A tensor in chunks. They make up the whole whichever ranks wrote them, so that it is in one part.

    Attributes:
        key: for errors.
        shape: of the whole.
        data_type: fp32, fp16, bf16, or another name.
        chunks: that make it up.
        axis: always None.
        part_count: always 1.
    """

    key: str
    shape: tuple[int, ...]
    data_type: str
    chunks: tuple[Chunk, ...]
    axis: int | None = None
    part_count: int = 1

    @property
    def unproved(self) -> tuple[str, ...]:
        """Files that hold it without a checksum of its bytes."""
        return tuple(chunk.unproved for chunk in self.chunks if chunk.unproved)

    def parts(self) -> tuple[Array, ...]:
        """Map the chunks and describe the whole by them."""
        if len(self.chunks) == 1:
            return (self.chunks[0].read(),)
        pieces = [(chunk.offsets, chunk.read()) for chunk in self.chunks]
        return (array_of_pieces(self.shape, STORAGE[self.data_type], pieces),)

    def check(self) -> None:
        """Refuse chunks that leave a hole, overlap or reach beyond the whole; CheckpointError."""
        corners = {tuple(offset + size for offset, size in zip(c.offsets, c.sizes, strict=True)) for c in self.chunks}
        is_inside = all(end <= full for corner in corners for end, full in zip(corner, self.shape, strict=True))
        total = sum(prod(chunk.sizes) for chunk in self.chunks)
        if not is_inside or total != prod(self.shape) or self._overlap():
            raise CheckpointError(
                f"{self.key}: its chunks do not make up {list(self.shape)}", "copy the checkpoint again"
            )

    def _overlap(self) -> bool:
        """Whether two chunks have an element in common."""
        low = np.array([chunk.offsets for chunk in self.chunks]).reshape(len(self.chunks), len(self.shape))
        high = low + np.array([chunk.sizes for chunk in self.chunks]).reshape(low.shape)
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


def _layer_of(chunk: Chunk, layer: int) -> Chunk:
    return Chunk(chunk.offsets[1:], chunk.sizes[1:], lambda: chunk.read()[layer - chunk.offsets[0]], chunk.unproved)
