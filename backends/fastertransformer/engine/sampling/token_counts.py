"""How often each row has generated each token."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import Array, upload


class TokenCounts:
    """A table on the device, int32 [slots, V], that exists while a row needs it.

    Args:
        vocab_size: V.
        device: where the table is.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._table: Tensor | None = None

    def fit(self, slots: int, is_needed: bool) -> None:
        """Make room for the first ``slots`` slots, if a row needs it or the table exists."""
        have = 0 if self._table is None else len(self._table)
        if slots <= have or not (is_needed or have):
            return
        size = 1 << (slots - 1).bit_length()
        more = torch.zeros(size - have, self._vocab_size, dtype=torch.int32, device=self._device)
        self._table = more if self._table is None else torch.cat((self._table, more))

    def begin(self, slot: int, tokens: Array) -> None:
        """Count the tokens, [n], that a row has when it takes a slot."""
        assert self._table is not None, "fit comes first"
        row = self._table[slot].zero_()
        if len(tokens):
            ids = upload(tokens, self._device)
            row.index_add_(0, ids, torch.ones_like(ids, dtype=row.dtype))

    def move(self, to: Tensor, of: Tensor) -> None:
        """Overwrite slots with others, int64 [n] each."""
        if self._table is not None:
            self._table[to] = self._table[of]

    def add(self, tokens: Tensor) -> None:
        """Count the next token of the first slots, [N]."""
        if self._table is not None:
            chosen = tokens[:, None]
            self._table[: len(tokens)].scatter_add_(1, chosen, torch.ones_like(chosen, dtype=self._table.dtype))

    def of(self, slots: int) -> Tensor:
        """Return the counts of the first slots, int32 [slots, V]."""
        assert self._table is not None, "fit comes first"
        return self._table[:slots]

    def drop(self) -> None:
        """Free the table, when no row needs it."""
        self._table = None
