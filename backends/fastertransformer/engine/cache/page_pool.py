"""The free pages of the KV cache, and those that rows use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class RowPages:
    """The pages of one row: of a sequence, or of one beam of it.

    Attributes:
        pages: that the row uses, in the order of its tokens; at its beginning 0 for each that it has given back.
        held: free pages right after these, kept for the row's growth while no other row needs them.
        source: pages of its encoder's output.
        slot: where the row is in the batch; -1: it is in none.
        copies: pages right before its own, to which those that it shares are copied once its context has been run.
        state: its state, see states.py; 0: the model keeps none.
        origin: the state that it begins with, until that is copied; 0: it begins with zeros.
        trail: a copy of its state after its first ``trail_end`` tokens; 0: there is none. See state_pool.py.
    """

    pages: list[int] = field(default_factory=list)
    held: range = range(0)
    source: list[int] = field(default_factory=list)
    slot: int = -1
    copies: list[int] = field(default_factory=list)
    state: int = 0
    origin: int = 0
    trail: int = 0
    trail_end: int = 0

    @property
    def listed(self) -> list[int]:
        """What the device's page table lists: the pages, and after them those that are held."""
        return [*self.pages, *self.held]


class PagePool:
    """The free pages, as runs of contiguous ones.

    Contiguous pages are allocated if there are any, because a CPU reads them in index, and those of the lowest numbers,
    so that memory that was never used stays untouched. So that a row stays contiguous while it grows, the pages after
    it are held for it. They are free nevertheless: when no other page is left, they are taken from the row that holds
    the most.

    Attributes:
        taken_from: rows that pages were taken from, and the column of each of these pages in the row's page table.
        drafted: pages in use of which a draft model has keys and values for every token.
    """

    def __init__(self, pages: range) -> None:
        self._runs = [pages] if pages else []
        self._holders: dict[RowPages, None] = {}
        self._held = 0
        self.taken_from: list[tuple[RowPages, int]] = []
        self.drafted: set[int] = set()

    def __len__(self) -> int:
        return sum(map(len, self._runs)) + self._held

    def has_run(self, count: int, after: int = 0) -> bool:
        """Return whether ``count`` contiguous pages are free: right after the page ``after``, if it is not 0."""
        return any(len(run) >= count and (not after or run.start == after + 1) for run in self._runs)

    def allocate(self, row: RowPages, count: int, growth: int = 0) -> None:
        """Append pages to a row, first those that are held for it; there must be as many.

        Args:
            row: its last pages are neighbours of the new ones if possible.
            count: of pages.
            growth: how many more pages the row may take later.
        """
        own = row.held[:count]
        if own:
            row.pages += own
            self._hold(row, row.held[len(own) :])
        if count > len(own):
            after = row.pages[-1] if row.pages else 0
            row.pages += self.take(count - len(own), after, growth)
        if growth and not row.held:
            self._hold_after(row, growth)

    def take(self, count: int, after: int = 0, growth: int = 0) -> list[int]:
        """Take pages, contiguous with the page ``after`` if possible, else contiguous with each other."""
        taken: list[int] = []
        while count > 0:
            if not self._runs:
                self._take_back(count)
            run = self._choose(count, after, growth)
            index = self._runs.index(run)
            self._runs[index : index + 1] = [run[count:]] if len(run) > count else []
            taken += run[:count]
            count -= len(run)
            after = taken[-1]
        return taken

    def _choose(self, count: int, after: int, growth: int) -> range:
        """Choose the run to take pages of: one with room for all, and for its growth."""
        for run in self._runs:
            if run.start == after + 1 and len(run) >= count:
                return run
        wide = next((run for run in self._runs if len(run) >= count + growth), None)
        return wide or max(self._runs, key=len)

    def _take_back(self, count: int) -> None:
        """Take pages from the row that holds the most."""
        row = max(self._holders, key=lambda each: len(each.held))
        kept = max(0, len(row.held) - count)
        first = len(row.pages)
        self.taken_from += [(row, first + index) for index in range(kept, len(row.held))]
        pages = row.held[kept:]
        self._hold(row, row.held[:kept])
        self.free(pages)

    def _hold_after(self, row: RowPages, growth: int) -> None:
        """Hold the free pages right after a row's last."""
        for index, run in enumerate(self._runs):
            if run.start == row.pages[-1] + 1:
                self._runs[index : index + 1] = [run[growth:]] if len(run) > growth else []
                self._hold(row, run[:growth])
                return

    def _hold(self, row: RowPages, pages: range) -> None:
        self._held += len(pages) - len(row.held)
        row.held = pages
        if pages:
            self._holders[row] = None
        else:
            self._holders.pop(row, None)

    def free(self, pages: Sequence[int]) -> None:
        """Free pages."""
        self.drafted.difference_update(pages)
        runs = sorted([*self._runs, *(range(page, page + 1) for page in pages)], key=lambda run: run.start)
        self._runs = []
        for run in runs:
            before = self._runs.pop() if self._runs and self._runs[-1].stop == run.start else run
            self._runs.append(range(before.start, run.stop))

    def release(self, row: RowPages) -> None:
        """Free the pages that are held for a row which takes no more."""
        pages = row.held
        self._hold(row, range(0))
        self.free(pages)
