"""The block manager: which pages of the KV cache each row uses, on the host of rank 0.

A row takes the pages of its context when it starts, and another one whenever its tokens cross a page's end. The device
has a block table of each slot, which lists the row's pages and those held for it, so that growth within these changes
nothing there; ``changes`` lists what must be uploaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import EngineError
from ..request.schema import Array
from .page_pool import PagePool, RowPages
from .prefix_index import PAGE, PrefixIndex

__all__ = ["PAGE", "BlockManager", "pages_of"]


def pages_of(entries: int) -> int:
    """Give the number of pages that hold some entries."""
    return -(-entries // PAGE)


class BlockManager:
    """The pages of all rows.

    Args:
        count: of pages. Page 0 is not among them: padding is written there.
        most_unused: pages of prompts and answers that are kept for later rows though none uses them, see
            prefix_index.py; 0: rows share nothing.

    Attributes:
        count: see above.
        keeps_prefixes: whether rows share pages.
        prefixes: the pages that are known by their tokens.
    """

    def __init__(self, count: int, most_unused: int = 0) -> None:
        self.count, self.keeps_prefixes, self.prefixes = count, most_unused > 0, PrefixIndex(most_unused)
        self._pool = PagePool(range(1, count + 1))
        self._changes: list[tuple[RowPages, int, int]] = []  # row, column of its block table, page

    @property
    def free(self) -> int:
        """The number of free pages, those that are held for rows or known by their tokens included."""
        return len(self._pool) + len(self.prefixes)

    def take(
        self, entries: int, most: int = 0, source: int = 0, saved: Sequence[int] = (), shared: Sequence[int] = ()
    ) -> RowPages:
        """Take the pages of a new row.

        Args:
            entries: that the row has at first.
            most: entries that it may have at the end; 0: no more.
            source: entries of its encoder's output.
            saved: pages that it begins with, see save.
            shared: known pages that it begins with, see PrefixIndex.find.

        Raises:
            EngineError: there are too few free pages; nothing was taken.
        """
        count, beyond = pages_of(entries) - len(saved) - len(shared), pages_of(source)
        free = self.free - self.prefixes.count_unused(shared)
        if count + beyond > free:
            raise EngineError(f"{count + beyond} pages of the KV cache for a row; there are {free}")
        self.prefixes.use(shared)
        self._evict(count + beyond)
        row = RowPages([*saved, *shared], source=self._pool.take(beyond))
        self._pool.allocate(row, max(0, count), max(0, pages_of(most) - pages_of(entries)))
        self._note_taken()
        return row

    def grow(self, row: RowPages, entries: int) -> bool:
        """Give a row the pages that it lacks for some entries; false: there are too few, and nothing was taken.

        A row whose layers all have a window could give back, here, the pages that lie wholly behind it.
        """
        missing = pages_of(entries) - len(row.pages)
        if missing > self.free:
            return False
        if missing > 0:
            listed = len(row.pages) + len(row.held)
            self._evict(missing)
            self._pool.allocate(row, missing)
            self._changes += [(row, column, row.pages[column]) for column in range(listed, len(row.pages))]
            self._note_taken()
        return True

    def _evict(self, count: int) -> None:
        """Let the pool have ``count`` pages at least."""
        if count > len(self._pool):
            self._pool.free(self.prefixes.evict(count - len(self._pool)))

    def _note_taken(self) -> None:
        """Note that the tables of rows that others took pages from list these no longer."""
        for row, column in self._pool.taken_from:
            self._changes.append((row, column, 0))
        self._pool.taken_from.clear()

    def take_changes(self) -> Array | None:
        """Give the slot, column and page of what the device's block tables lack, int64 [3, n]; None: nothing."""
        last = {(row.slot, column): page for row, column, page in self._changes if row.slot >= 0}
        self._changes.clear()
        return np.array([(*place, page) for place, page in last.items()]).T if last else None

    def release(self, rows: Iterable[RowPages]) -> list[int]:
        """Free all pages of rows; returns those that must be cleared, because their numbers are not finite."""
        to_clear = []
        for row in rows:
            self._pool.release(row)
            free, dirty = self.prefixes.release(row.pages)
            self._pool.free([*free, *row.source])
            row.pages, row.source, row.slot = [], [], -1
            to_clear += dirty
        return to_clear

    def save(self, row: RowPages, entries: int) -> list[int]:
        """Take the pages of a row's first entries from it, before it is released."""
        count = pages_of(entries)
        saved, row.pages = row.pages[:count], row.pages[count:]
        return saved

    def free_saved(self, pages: Sequence[int]) -> None:
        """Free what save gave."""
        self._pool.free(pages)
