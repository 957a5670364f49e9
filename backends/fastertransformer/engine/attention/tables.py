"""Which pages of a pool each slot has: lists on the host, and a table on the device that what runs there reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..requests.request import Array
from .cache import MOST_SLOTS, upload


class PageTable:
    """The pages of every slot in use.

    Args:
        free: numbers of pages that nobody has; several tables may share it.
        width: pages that a slot has at most.
        device: where the table lives.

    Attributes:
        on_device: int32 [MOST_SLOTS + 1, width]: the pages of each slot; 0 behind its last. Nobody has the last slot.
        owned: the same by slot, without zeros.
    """

    def __init__(self, free: list[int], width: int, device: torch.device) -> None:
        self._free, self._device = free, device
        self.owned: list[list[int]] = []
        self._rows = np.zeros((MOST_SLOTS + 1, width), np.int32)
        self.on_device = torch.zeros(self._rows.shape, dtype=torch.int32, device=device)

    def place(self, counts: Sequence[int], given: Mapping[int, list[int]]) -> None:
        """Give the slots behind the last one so many pages each, of which some slots' first ones are given."""
        first = len(self.owned)
        for slot, count in enumerate(counts, first):
            pages = given.get(slot, [])
            self.owned.append(pages + [self._free.pop() for _ in range(count - len(pages))])
        self._announce(first, len(self.owned))

    def leave(self, kept: int, moved: Mapping[int, int]) -> None:
        """Free slots: ``kept`` are in use afterwards, and targets take what their sources have."""
        count, stay = len(self.owned), set(moved.values())
        for slot, pages in enumerate(self.owned):
            if slot in moved or (slot >= kept and slot not in stay):
                self._free += reversed(pages)
        for target, source in moved.items():
            self.owned[target] = self.owned[source]
        del self.owned[kept:]
        self._announce(min([kept, *moved]), count)

    def hand_over(self, slot: int, count: int) -> list[int]:
        """Take a slot's first pages from it; it is about to leave."""
        pages = self.owned[slot][:count]
        self.owned[slot] = self.owned[slot][count:]
        return pages

    def pages_of(self, slots: Array, count: int | None = None) -> list[int]:
        """Give the first pages of slots, or all of them, one slot behind the other."""
        return [page for slot in slots.tolist() for page in self.owned[slot][:count]]

    def _announce(self, first: int, end: int) -> None:
        """Tell the device which pages slots have."""
        self._rows[first:end] = 0
        for slot, pages in enumerate(self.owned[first:end], first):
            self._rows[slot, : len(pages)] = pages
        self.on_device[first:end] = upload(self._rows[first:end].copy(), self._device)
