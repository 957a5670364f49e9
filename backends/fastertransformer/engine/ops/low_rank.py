"""What adapters add to a linear layer's product: a product of two thin matrices, of each token its own adapter's.

Several adapters lie behind each other, each in a place of its own, all with the rank of the largest: the rest is zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, upload


class LowRank:
    """The adapters of one linear layer, of which several matrices may be parts that lie behind each other.

    Args:
        places: adapters that there is room for.
        rank: of each.
        inputs: of the layer.
        parts: rows of each of its parts.
        like: gives device and type.

    Attributes:
        down: [places, parts * rank, inputs].
        up: [places, outputs, rank]: a row of the layer belongs to one part, and multiplies that one's numbers.
        ends: row behind each part.
    """

    def __init__(self, places: int, rank: int, inputs: int, parts: Sequence[int], like: Tensor) -> None:
        self.rank, self.ends = rank, np.cumsum(parts).tolist()
        self.down = like.new_zeros((places, len(parts) * rank, inputs))
        self.up = like.new_zeros((places, sum(parts), rank))

    @property
    def size_bytes(self) -> int:
        """Bytes of all places."""
        return self.down.nbytes + self.up.nbytes

    def part_of(self, first_row: int) -> int:
        """Return the part that begins with a row."""
        return [0, *self.ends].index(first_row)

    def clear(self, place: int) -> None:
        """Make a place's adapter add nothing."""
        self.down[place].zero_()
        self.up[place].zero_()

    def write(self, place: int, first_row: int, down: Tensor, up: Tensor) -> None:
        """Write an adapter's matrices of the part that begins with a row: [rank, inputs] and [rows, rank], scaled."""
        first = self.part_of(first_row) * self.rank
        self.down[place, first : first + len(down)].copy_(down, non_blocking=True)
        self.up[place, first_row : first_row + len(up), : up.shape[1]].copy_(up, non_blocking=True)


class AdaptedRows(Protocol):
    """The tokens of a call, sorted by adapter."""

    def add(self, y: Tensor, x: Tensor, low_rank: LowRank) -> None:
        """Add what the tokens' adapters make of x, [..., in], to y, [..., out], contiguous."""


class GroupedRows:
    """Tokens by adapter, in torch; those without one are left alone.

    Args:
        adapters: int64 [T], place of each token's adapter; ``count``: it has none.
        count: places.
        device: of the tokens.
    """

    def __init__(self, adapters: Array, count: int, device: torch.device) -> None:
        places = np.unique(adapters[adapters < count]).tolist()
        self._rows = {place: upload(np.flatnonzero(adapters == place), device) for place in places}

    def add(self, y: Tensor, x: Tensor, low_rank: LowRank) -> None:
        """See AdaptedRows."""
        flat, to, rank = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1]), low_rank.rank
        for place, rows in self._rows.items():
            narrow, first = flat[rows] @ low_rank.down[place].T, 0
            wide = []
            for part, end in enumerate(low_rank.ends):
                wide.append(narrow[:, part * rank : (part + 1) * rank] @ low_rank.up[place, first:end].T)
                first = end
            to.index_add_(0, rows, torch.cat(wide, 1).to(y.dtype))
