"""What generation asks of the network: a step at a time, on the places of one batch.

A place is a row of the cache. The one process that samples calls these; where the network is spread over several,
``parallel`` has every other process take the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import KvCache
from .network import Network
from .request import Array


class Steps:
    """The steps of one process.

    Args:
        model: the network, or this process's part of it.
        cache: of that part.
    """

    def __init__(self, model: Network, cache: KvCache) -> None:
        self.model, self.cache = model, cache
        self.config = model.config
        self.device = model.weights.token_embedding.device

    def begin(self, rows: int, length: int) -> None:
        """Make room for a batch of so many places, each of at most that many tokens."""
        self.cache.reserve(rows, length)

    def prefill(self, ids: Tensor, first: int) -> Tensor:
        """Run whole inputs in the places from first on: ids [B, T], padded -> [B, T, hidden], before the final norm."""
        lengths = torch.full_like(ids[:, 0], ids.shape[1])
        return self.model.extend(ids, None, lengths, slice(first, first + len(ids)), self.cache, ids.shape[1])

    def decode(self, ids: Tensor, lengths: Array) -> Tensor:
        """Run one token in each of the first B places.

        Args:
            ids: [B].
            lengths: int64 [B], on the host: tokens of each place, this one included.

        Returns:
            [B, hidden], before the final norm.
        """
        positions = torch.from_numpy(lengths - 1).to(self.device)
        return self.model.decode(ids, positions, slice(0, len(lengths)), self.cache, int(lengths.max()))

    def move(self, places: Sequence[int], sources: Sequence[int]) -> None:
        """Overwrite places with what is cached in others."""
        self.cache.copy(places, sources, self.cache.capacity)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [..., hidden] -> fp32 [..., V]."""
        return self.model.logits(hidden)

    def close(self) -> None:
        """Take leave: no step follows."""
