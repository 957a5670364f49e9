"""A weight and what an adapter adds to it: a product of two thin matrices, computed where it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from export_scripts.tensors.array_of_pieces import array_of_pieces
from export_scripts.tensors.dtypes import STORAGE, Array
from export_scripts.tensors.low_rank import LowRankSum
from export_scripts.weights.schema import Computed, LazyTensor
from handover.errors import CheckpointError
from models.spelling import Fused

_HALVES = ("_w", "_v")
"""What follows the name of a gated weight's first and second half."""
QKV = Fused((("q", "heads_per_group"), ("k", 1), ("v", 1)), "size_per_head")
FC1 = Fused((("gate", 1), ("up", 1)))
"""How the rows of the fused weights lie, by the words of adapters that have matrices of their own for each."""
Matrix = TypeVar("Matrix", bound=LazyTensor)


@dataclass(frozen=True)
class Update:
    """What an adapter adds to one weight.

    Attributes:
        names: of the weight, one of which the model has; words before a model's own names may be left over.
        factors: read from the adapter.
        read: gives [rows, rank] and [rank, columns], fp32, whose product is added.
        scale: of the product.
        is_gated: the first half of all rows is the gate's; each training rank's part has rows of both halves.
        keys: of the adapter, that it is made of.
        apart: where tensors that lie fused in the weight have matrices of their own, the numbers of those that do:
            ``read`` gives theirs side by side, with zeros where they do not meet. Empty: all rows share the columns.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    factors: tuple[LazyTensor, ...]
    read: Callable[[], tuple[Array, Array]]
    scale: float
    is_gated: bool = False
    keys: tuple[str, ...] = ()
    apart: tuple[int, ...] = ()

    def columns(self, index: int, rank: int) -> slice | None:
        """Find the columns, of all ``rank``, of one of the tensors that lie fused; None: nothing is added to it."""
        if not self.apart:
            return slice(0, rank)
        if index not in self.apart:
            return None
        width = rank // len(self.apart)
        return slice(self.apart.index(index) * width, (self.apart.index(index) + 1) * width)

    def halves(self) -> tuple[Update, ...]:
        """Return what is added to the gate's weight and to the other, where each is a tensor of its own."""
        rows = self.shape[0] // 2

        def half(index: int, suffix: str) -> Update:
            def read() -> tuple[Array, Array]:
                left, right = self.read()
                columns = self.columns(index, right.shape[0])
                return left[index * rows : (index + 1) * rows, columns], right[columns]

            names, shape = tuple(f"{name}{suffix}" for name in self.names), (rows, *self.shape[1:])
            return replace(self, names=names, shape=shape, read=read, is_gated=False, apart=())

        return tuple(half(n, suffix) for n, suffix in enumerate(_HALVES) if not self.apart or n in self.apart)


@dataclass(frozen=True)
class MergedTensor(Computed):
    """A weight with an adapter's update in it; computed in fp32, box by box, where it is read."""

    base: LazyTensor
    update: Update

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, per axis."""
        return self.base.shape

    @property
    def axis(self) -> int | None:
        """Axis along which the weight's parts follow one another."""
        return self.base.axis

    @property
    def sources(self) -> tuple[LazyTensor, ...]:
        """The weight and the factors."""
        return (self.base, *self.update.factors)

    def parts(self) -> tuple[Array, ...]:
        """Describe the sum of each part by the part and the factors, which are read; the sum is not computed yet.

        Raises:
            CheckpointError: a factor cannot be read or is damaged.
        """
        left, right = self.update.read()
        left = left * np.float32(self.update.scale)
        parts = self.base.parts()
        merged, start = [], 0
        for number, part in enumerate(parts):
            stop = start + (part.shape[self.axis] if self.axis is not None else 0)
            columns = right[:, start:stop] if self.axis == 1 else right
            rows = left
            if self.axis == 0:
                rows = _gated_rows(left, number, len(parts)) if self.update.is_gated else left[start:stop]
            total = LowRankSum(part, self.base.data_type, rows, columns)
            merged.append(array_of_pieces(total.shape, STORAGE["fp32"], [((0, 0), total)]))
            start = stop
        return tuple(merged)


def _gated_rows(left: Array, rank: int, ranks: int) -> Array:
    """Take one training rank's rows: its own of the gate, then its own of the other half."""
    halves = left.reshape(2, ranks, -1, left.shape[1])
    return np.ascontiguousarray(halves[:, rank]).reshape(-1, left.shape[1])


def pair_of(
    place: str, sides: Mapping[str, str], tensors: Mapping[str, Matrix], word: str, rank: int, beside: Iterable[str]
) -> tuple[Matrix, Matrix]:
    """Find the two matrices of an adapter of NeMo's: linear_in [rank, columns] and linear_out [rows, rank].

    Args:
        place: what their names begin with.
        sides: key of each, by ``in`` and ``out``.
        tensors: by key.
        word: how the configuration calls the rank, for the error.
        rank: of the product.
        beside: keys that are there, for the error.

    Raises:
        CheckpointError: a matrix is missing or of another rank.
    """
    if absent := [f"{place}.linear_{side}.weight" for side in ("in", "out") if side not in sides]:
        raise CheckpointError(f"{', '.join(absent)}  missing beside {', '.join(beside)}")
    down, up = (tensors[sides[side]] for side in ("in", "out"))
    if [len(down.shape), len(up.shape), down.shape[:1], up.shape[1:]] != [2, 2, (rank,), (rank,)]:
        raise CheckpointError(
            f"{place}: linear_in  {list(down.shape)} and linear_out  {list(up.shape)}  are not matrices of {word}"
        )
    return down, up


def swapped(rows: Array, outer: int, inner: int) -> Array:
    """Reorder rows of [outer, inner, ...] to [inner, outer, ...]."""
    return np.ascontiguousarray(rows.reshape(outer, inner, -1, rows.shape[1]).swapaxes(0, 1)).reshape(rows.shape)


def side_by_side(
    pairs: Mapping[str, tuple[Array, Array]], fused: Fused, rows: int, sizes: Mapping[str, int]
) -> tuple[Array, Array]:
    """Join the matrices of tensors that lie fused in one weight, each in columns of its own.

    Args:
        pairs: [rank, columns] and [rows, rank] of each, by its word in ``fused``.
        fused: how the weight's rows lie.
        rows: of the weight.
        sizes: of the symbols in ``fused``.
    """
    left = np.zeros((rows, sum(up.shape[1] for _, up in pairs.values())), np.float32)
    start = 0
    for word, (_, up) in pairs.items():
        shown = fused.read(left[:, start : start + up.shape[1]], word, lambda symbol: sizes[str(symbol)])  # a view
        shown[...] = up.reshape(shown.shape)
        start += up.shape[1]
    return left, np.concatenate([down for down, _ in pairs.values()])


def suffix_in(tensors: Mapping[str, LazyTensor], name: str) -> str | None:
    """Find a name among the model's, without the words that stand before them in a model with its head."""
    while name:
        if name in tensors:
            return name
        name = name.partition(".")[2]
    return None
