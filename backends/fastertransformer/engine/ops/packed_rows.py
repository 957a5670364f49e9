"""Packed rows: the tokens of several rows on one axis, row after row, without padding."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array, upload


class Rows(NamedTuple):
    """B packed rows of T tokens together, on the device.

    Attributes:
        ids: int64 [T].
        positions: int64 [T], of each token in its row.
        slots: int64 [T], slot of the cache of each token's row.
        ends: int32 [B + 1]: 0, then where each row ends.
        lengths: of the rows; None: the host does not know them; the kernels read ``ends``.
        contexts: if lengths are None, the most rows that may have more than one token; 0: any may.
        starts: position of each row's first token; a row of one token may have any; None: the host does not know them.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    ends: Tensor
    lengths: list[int] | None
    contexts: int = 0
    starts: list[int] | None = None

    @property
    def row_slots(self) -> Tensor:
        """Slot of each row; rows without tokens, of a CUDA graph, may be behind all."""
        return self.slots[self.ends[:-1].long().clamp(max=len(self.slots) - 1)]

    @property
    def longest(self) -> int:
        """At least the length of the longest row."""
        return max(self.lengths) if self.lengths else len(self.ids)

    @property
    def several(self) -> int:
        """At least the number of rows of more than one token."""
        if self.lengths:
            return sum(length > 1 for length in self.lengths)
        return self.contexts or len(self.ends) - 1


class NumberedRows(NamedTuple):
    """Packed rows on the host, as arrays.

    Attributes:
        tokens: int64 [3, T]: ids, positions and slots.
        ends: int64 [B + 1].
        lengths: int64 [B].
    """

    tokens: Array
    ends: Array
    lengths: Array

    @classmethod
    def of(cls, ids: Array, starts: Array, lengths: Array, first: int) -> NumberedRows:
        """Return the tokens of consecutive slots their positions and slots.

        Args:
            ids: int64 [T].
            starts: int64 [B], position of each row's first token.
            lengths: int64 [B].
            first: slot of the first row.
        """
        slots = np.repeat(np.arange(first, first + len(lengths)), lengths)
        ends = np.concatenate(([0], np.cumsum(lengths)))
        positions = np.arange(len(ids)) - np.repeat(ends[:-1] - starts, lengths)
        return cls(np.stack((ids, positions, slots)), ends, lengths)

    def on(self, device: torch.device) -> Rows:
        """Copy to a device."""
        ids, positions, slots = upload(self.tokens, device)
        ends = upload(self.ends.astype(np.int32), device)
        return Rows(ids, positions, slots, ends, self.lengths.tolist(), starts=self.starts.tolist())

    @property
    def starts(self) -> Array:
        """Position of each row's first token, int64 [B]."""
        starts: Array = self.tokens[1, self.ends[:-1]]
        return starts
