"""Put a target together from its sources: pieces that lie side by side, or that are added, none of them held whole.

A target's layout is applied to each part that the reader mapped. That moves no byte; it says where in the target each
part's bytes belong. Any box of the target can then be read and written on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np

from export_scripts.conversion.move.transposition import Transposer
from export_scripts.tensors.dtypes import DIGITS, STORAGE, Array, item_bytes, recast, widen
from export_scripts.tensors.mapped import Reader
from export_scripts.weights.schema import Elementwise
from ft_format.layout import Dims
from handover.errors import CheckpointError


@dataclass(frozen=True)
class Piece:
    """A part of a target.

    Attributes:
        view: its values, mapped or in memory, in the target's order of axes.
        data_type: fp32, fp16 or bf16, of the values.
        start: place of its first element in the target.
    """

    view: Array
    data_type: str
    start: tuple[int, ...]

    def moved(self, axis: int, by: int) -> Piece:
        """Shift it along an axis."""
        return replace(self, start=(*self.start[:axis], self.start[axis] + by, *self.start[axis + 1 :]))

    def cropped(self, axis: int, start: int, stop: int) -> Piece | None:
        """Keep what lies in a range of an axis, counted from the range's start; None: nothing does."""
        own = self.start[axis]
        low, high = max(start - own, 0), min(stop - own, self.view.shape[axis])
        if low >= high:
            return None
        index = (*(slice(None),) * axis, slice(low, high))
        place = (*self.start[:axis], max(own - start, 0), *self.start[axis + 1 :])
        return Piece(self.view[index], self.data_type, place)


@dataclass(frozen=True)
class Assembly:
    """A target, or a box of it.

    Attributes:
        shape: of the box.
        terms: what is added up, mostly one term; the pieces of each fill the box.
        elementwise: a function of the fp32 values; None: they stay as they are.
        origin: place of the box's first element in the target; empty: it is the target's.
        is_exact: a computed value that has no place among the target's numbers is refused, unless the type has fewer
            digits than the sources' own and rounds all of the model's weights.
    """

    shape: tuple[int, ...]
    terms: tuple[tuple[Piece, ...], ...]
    elementwise: Elementwise | None = None
    dims: Dims | None = None
    origin: tuple[int, ...] = ()
    is_exact: bool = False

    @property
    def data_type(self) -> str:
        """The pieces' data type; fp32 where they are computed with."""
        types = {piece.data_type for term in self.terms for piece in term}
        return types.pop() if len(types) == 1 and len(self.terms) == 1 and not self.elementwise else "fp32"

    @property
    def is_plain(self) -> bool:
        """Whether all bytes of a piece lie together and in the box's order."""
        return all(_is_plain(piece.view) for piece in self.pieces())

    @property
    def row_bytes(self) -> int:
        """Bytes of the sources for one element of the first axis."""
        size_bytes = sum(piece.view.size * piece.view.itemsize for term in self.terms for piece in term)
        return -(-size_bytes // max(1, self.shape[0]))

    def pieces(self) -> Iterator[Piece]:
        """Every piece of every term."""
        for term in self.terms:
            yield from term

    def cropped(self, axis: int, start: int, stop: int) -> Assembly:
        """Keep a range of an axis."""
        cut = [[piece.cropped(axis, start, stop) for piece in term] for term in self.terms]
        terms = tuple(tuple(piece for piece in term if piece) for term in cut)
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        origin = list(self.origin or (0,) * len(shape))
        origin[axis] += start
        return replace(self, shape=shape, terms=terms, origin=tuple(origin))

    def loaded(self, reader: Reader) -> Assembly:
        """Read every piece; what was read before is no longer valid."""
        reader.forget()
        return replace(
            self,
            terms=tuple(tuple(replace(piece, view=reader.read(piece.view)) for piece in term) for term in self.terms),
        )

    def verify(self, reader: Reader) -> None:
        """Compare the checksums of all records that the pieces are parts of."""
        for piece in self.pieces():
            reader.verify(piece.view)

    def values(self, data_type: str, buffer: Array, transposer: Transposer) -> Array:
        """Return a loaded box in row-major order, cast; not checked for what is not finite.

        Args:
            data_type: of the result.
            buffer: memory for it, as bytes; the result is valid until that is used again.
            transposer: of this thread.

        Raises:
            CheckpointError: a value that must be exact is not.
        """
        first = self.terms[0][0] if self.terms and self.terms[0] else None
        if len(self.terms) == 1 and not self.elementwise:
            if first and first.view.shape == self.shape and first.data_type == data_type and _is_plain(first.view):
                return first.view
            target = _carved(buffer, self.shape, data_type)
            self._fill(target, self.terms[0], data_type, transposer)
            return target
        total = np.zeros(self.shape, np.float32)
        addend = np.empty(self.shape, np.float32)
        for term in self.terms:
            self._fill(addend, term, "fp32", transposer)
            total += addend
        made = self.elementwise(total, self.dims) if self.elementwise else total
        cast = np.ascontiguousarray(recast(made, "fp32", data_type))
        if self.is_exact:
            self._check_exact(made, cast, data_type)
        return cast

    def _check_exact(self, made: Array, cast: Array, data_type: str) -> None:
        """Refuse a cast that loses digits of numbers which their own type could not have lost."""
        own = {piece.data_type for piece in self.pieces()}
        if any(DIGITS[data_type] < DIGITS[each] for each in own):
            return
        lost = widen(cast, data_type) != made
        lost &= np.isfinite(made)
        if lost.any():
            value = made[np.unravel_index(lost.argmax(), lost.shape)]
            raise CheckpointError(
                f"{int(lost.sum())} of its numbers, computed from weights in {' and '.join(sorted(own))}, are no "
                f"numbers of {data_type}; the first is {value:.9g}",
                "export.model.weight_data_type=fp32 holds them",
            )

    def _fill(self, target: Array, term: Sequence[Piece], data_type: str, transposer: Transposer) -> None:
        for piece in term:
            place = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.view.shape, strict=True))
            convert = None
            if piece.data_type != data_type:
                convert = partial(recast, source=piece.data_type, target=data_type)
            transposer.copy(target[place], piece.view, convert)


def _is_plain(view: Array) -> bool:
    return view.flags.c_contiguous and view.flags.aligned


def _carved(buffer: Array, shape: tuple[int, ...], data_type: str) -> Array:
    size_bytes = prod(shape) * item_bytes(data_type)
    memory = buffer[:size_bytes] if size_bytes <= buffer.size else np.empty(size_bytes, np.uint8)
    return memory.view(STORAGE[data_type]).reshape(shape)
