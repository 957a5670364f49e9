"""What adapters add to a linear layer's product: a product of two thin matrices, of each token its own adapter's.

Several adapters lie behind each other, each in a place of its own, all with the rank of the largest: the rest is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Adaptable:
    """What adapters may change: a matrix.

    Attributes:
        joined: this matrix and another one after it, [out + other's out, in], without biases; see Linear.join.
        joined_at: the first row of this matrix there.
        low_rank: what adapters add to it, or to ``joined`` where there is one; None: they add nothing.
        with_adapters: this matrix, and behind it all of ``low_rank.down``; None: that lies elsewhere.
    """

    joined: Any = None
    joined_at = 0
    low_rank: LowRank | None = None
    with_adapters: Any = None


class LowRank:
    """The adapters of one linear layer, of which several matrices may be parts that lie behind each other.

    Args:
        places: adapters that there is room for.
        rank: of each.
        inputs: of the layer.
        parts: rows of each of its parts.
        like: gives device and type.
        down: memory for ``down``, zeros; None: it gets its own.
        has_marks: whether many adapters may leave the layer alone, so that kernels pass over what these add: zeros.

    Attributes:
        down: [places, parts * rank, inputs].
        up: [places, outputs, rank]: a row of the layer belongs to one part, and multiplies that one's numbers.
        ends: row behind each part.
        changing: places whose adapters change the layer.
        marks: int32 [places], the same on the device: whether a place's does; None: it is not known there.
    """

    def __init__(
        self,
        places: int,
        rank: int,
        inputs: int,
        parts: Sequence[int],
        like: Tensor,
        down: Tensor | None = None,
        has_marks: bool = False,
    ) -> None:
        self.rank, self.ends = rank, np.cumsum(parts).tolist()
        shape = places, len(parts) * rank, inputs
        self.down = like.new_zeros(shape) if down is None else down.view(shape)
        self.up = like.new_zeros((places, sum(parts), rank))
        self.changing = set[int]()
        self.marks = like.new_zeros(places, dtype=torch.int32) if has_marks else None

    @property
    def size_bytes(self) -> int:
        """Bytes of all places."""
        return self.down.nbytes + self.up.nbytes

    def part_of(self, first_row: int) -> int:
        """Return the part that begins with a row."""
        return [0, *self.ends].index(first_row)

    def _mark(self, place: int, is_changing: bool) -> None:
        self.changing = self.changing | {place} if is_changing else self.changing - {place}
        if self.marks is not None:
            self.marks[place] = int(is_changing)

    def clear(self, place: int) -> None:
        """Make a place's adapter add nothing."""
        self._mark(place, is_changing=False)
        self.down[place].zero_()
        self.up[place].zero_()

    def write(self, place: int, first_row: int, down: Tensor, up: Tensor) -> None:
        """Write an adapter's matrices of the part that begins with a row: [rank, inputs] and [rows, rank], scaled."""
        self._mark(place, is_changing=True)
        first = self.part_of(first_row) * self.rank
        self.down[place, first : first + len(down)].copy_(down, non_blocking=True)
        self.up[place, first_row : first_row + len(up), : up.shape[1]].copy_(up, non_blocking=True)
