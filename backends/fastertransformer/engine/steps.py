"""What generation asks of the network: a step at a time, on the places of one batch.

A place is a row of the cache. The one process that samples calls these; where the network is spread over several,
``parallel`` has every other process take the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .model import Gpt, KvCache
from .request import Array


class Steps:
    """The steps of one process.

    Args:
        model: the network, or this process's part of it.
        cache: of that part.
    """

    def __init__(self, model: Gpt, cache: KvCache) -> None:
        self.model, self.cache = model, cache
        self.config = model.config
        self.device = model.weights.token_embedding.device
        self._slots = cache.slots(0, 0)

    def begin(self, rows: int, length: int) -> None:
        """Make room for a batch of so many places, each of at most that many tokens."""
        self._slots = self.cache.slots(rows, length)

    def prefill(self, ids: Tensor, first: int) -> Tensor:
        """Run whole inputs in the places from first on: ids [B, T], padded -> [B, T, hidden], before the final norm."""
        return self.model.prefill(ids, self._slots[:, :, first : first + len(ids)])

    def decode(self, ids: Tensor, lengths: Array) -> Tensor:
        """Run one token in each of the first B places.

        Args:
            ids: [B].
            lengths: int64 [B], on the host: tokens of each place, this one included.

        Returns:
            [B, hidden], before the final norm.
        """
        longest = int(lengths.max())
        return self.model.decode(
            ids,
            torch.from_numpy(lengths - 1).to(self.device),
            self._slots[:, :, : len(lengths)],
            longest,
            is_uniform=longest == int(lengths.min()),
        )

    def move(self, places: Sequence[int], sources: Sequence[int]) -> None:
        """Overwrite places with what is cached in others."""
        for place, source in zip(places, sources, strict=True):
            self._slots[:, :, place] = self._slots[:, :, source]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V]."""
        return self.model.logits(hidden)

    def close(self) -> None:
        """Take leave: no step follows."""
