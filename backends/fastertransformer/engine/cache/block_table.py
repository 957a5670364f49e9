"""Which pages each slot has: lists on the host, and a table on the device that what runs there reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..request.parse import Array
from .sizing import MOST_SLOTS, upload


class PagePool:
    """Pages that nobody has, as runs of neighbours.

    Whoever takes some has neighbours if there are any, which a CPU reads where they are; and the lowest, so that memory
    that was never used stays untouched.

    Args:
        pages: all there are.
    """

    def __init__(self, pages: range) -> None:
        self._runs = [pages]

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def take(self, count: int, behind: int = 0) -> list[int]:
        """Take so many pages: the neighbours of the one that they come behind, or each other's, if it can be."""
        if not count:
            return []
        fitting = [run for run in self._runs if len(run) >= count] or self._runs[:1]
        run = min(fitting, key=lambda run: run.start != behind + 1)
        place = self._runs.index(run)
        self._runs[place : place + 1] = [run[count:]] if len(run) > count else []
        return [*run[:count], *self.take(max(0, count - len(run)))]

    def give(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        runs = sorted([*self._runs, *(range(page, page + 1) for page in pages)], key=lambda run: run.start)
        self._runs = []
        for run in runs:
            before = self._runs.pop() if self._runs and self._runs[-1].stop == run.start else run
            self._runs.append(range(before.start, run.stop))


class PageTable:
    """The pages of every slot in use.

    Args:
        free: pages that nobody has; several tables may share it.
        width: pages that a slot has at most.
        device: where the table lives.

    Attributes:
        on_device: int32 [MOST_SLOTS + 1, width]: the pages of each slot; 0 behind its last. Nobody has the last slot.
        owned: the same by slot, without zeros.
    """

    def __init__(self, free: PagePool, width: int, device: torch.device) -> None:
        self._free, self._device = free, device
        self.owned: list[list[int]] = []
        self._rows = np.zeros((MOST_SLOTS + 1, width), np.int32)
        self.on_device = torch.zeros(self._rows.shape, dtype=torch.int32, device=device)

    def place(self, counts: Sequence[int], given: Mapping[int, list[int]]) -> None:
        """Give the slots behind the last one so many pages each, of which some slots' first ones are given."""
        first = len(self.owned)
        for slot, count in enumerate(counts, first):
            pages = given.get(slot, [])
            self.owned.append(pages + self._free.take(count - len(pages), pages[-1] if pages else 0))
        self._announce(first, len(self.owned))

    def leave(self, kept: int, moved: Mapping[int, int]) -> None:
        """Free slots: ``kept`` are in use afterwards, and targets take what their sources have."""
        count, stay = len(self.owned), set(moved.values())
        for slot, pages in enumerate(self.owned):
            if slot in moved or (slot >= kept and slot not in stay):
                self._free.give(pages)
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
