"""Block tables: which pages each slot has, in lists on the host and in a table on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..request.schema import Array
from .sizing import MOST_SLOTS, upload


class PagePool:
    """The free pages, as runs of contiguous ones.

    Contiguous pages are allocated if there are any, because a CPU reads them in place, and those of the lowest numbers,
    so that memory that was never used stays untouched.
    """

    def __init__(self, pages: range) -> None:
        self._runs = [pages]

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def allocate(self, count: int, behind: int = 0) -> list[int]:
        """Allocate pages, contiguous with the page ``behind`` if possible, else contiguous with each other."""
        if not count:
            return []
        fitting = [run for run in self._runs if len(run) >= count] or self._runs[:1]
        run = min(fitting, key=lambda run: run.start != behind + 1)
        place = self._runs.index(run)
        self._runs[place : place + 1] = [run[count:]] if len(run) > count else []
        return [*run[:count], *self.allocate(max(0, count - len(run)))]

    def free(self, pages: Sequence[int]) -> None:
        """Free pages."""
        runs = sorted([*self._runs, *(range(page, page + 1) for page in pages)], key=lambda run: run.start)
        self._runs = []
        for run in runs:
            before = self._runs.pop() if self._runs and self._runs[-1].stop == run.start else run
            self._runs.append(range(before.start, run.stop))


class BlockTable:
    """The pages of every slot in use.

    Args:
        pool: free pages; several tables may share it.
        width: the most pages of a slot.
        device: of the table.

    Attributes:
        on_device: int32 [MOST_SLOTS + 1, width]: the pages of each slot, padded with 0. The last slot is unused.
        owned: the pages of each slot, without padding.
    """

    def __init__(self, pool: PagePool, width: int, device: torch.device) -> None:
        self._pool, self._device = pool, device
        self.owned: list[list[int]] = []
        self._rows = np.zeros((MOST_SLOTS + 1, width), np.int32)
        self.on_device = torch.zeros(self._rows.shape, dtype=torch.int32, device=device)

    def allocate(self, counts: Sequence[int], given: Mapping[int, list[int]]) -> None:
        """Append slots with counts[i] pages each; ``given`` supplies the leading pages of some slots."""
        first = len(self.owned)
        for slot, count in enumerate(counts, first):
            pages = given.get(slot, [])
            self.owned.append(pages + self._pool.allocate(count - len(pages), pages[-1] if pages else 0))
        self._upload(first, len(self.owned))

    def free(self, kept: int, moved: Mapping[int, int]) -> None:
        """Free slots: ``kept`` are in use afterwards; in ``moved``, each target gets the pages of its source."""
        count, stay = len(self.owned), set(moved.values())
        for slot, pages in enumerate(self.owned):
            if slot in moved or (slot >= kept and slot not in stay):
                self._pool.free(pages)
        for target, source in moved.items():
            self.owned[target] = self.owned[source]
        del self.owned[kept:]
        self._upload(min([kept, *moved]), count)

    def detach(self, slot: int, count: int) -> list[int]:
        """Take a slot's first pages from it; the slot is about to be freed."""
        pages = self.owned[slot][:count]
        self.owned[slot] = self.owned[slot][count:]
        return pages

    def pages_of(self, slots: Array, count: int | None = None) -> list[int]:
        """Give the first pages of slots, or all of them, one slot behind the other."""
        return [page for slot in slots.tolist() for page in self.owned[slot][:count]]

    def _upload(self, first: int, end: int) -> None:
        """Copy the rows of slots to the device."""
        self._rows[first:end] = 0
        for slot, pages in enumerate(self.owned[first:end], first):
            self._rows[slot, : len(pages)] = pages
        self.on_device[first:end] = upload(self._rows[first:end].copy(), self._device)
