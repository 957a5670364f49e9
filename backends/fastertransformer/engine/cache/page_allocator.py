"""The page allocator: which pages of the KV cache each row uses, and which state, on the host of rank 0.

A row takes the pages of its context when it starts, and another one whenever its tokens cross a page's end. The device
has a page table of each slot, which lists the row's pages and those held for it, so that growth within these changes
nothing there; ``take_changes`` lists what must be uploaded.

Where every layer has a window, a row that grows gives back the pages that no later token sees. Its other pages keep
their columns; in place of the pages that it has not any more are zeros: see PagePool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np

from ..arrays import MOST_SLOTS, Array
from ..errors import EngineError
from .page_pool import PagePool, RowPages
from .prefix_index import PAGE, PrefixIndex, pages_before_window
from .state_pool import StatePool

__all__ = ["PAGE", "PageAllocator", "pages_of"]


def pages_of(entries: int) -> int:
    """Return the number of pages that hold some entries."""
    return -(-entries // PAGE)


class PageAllocator:
    """The pages of all rows.

    Args:
        count: of pages. Page 0 is not among them: padding is written there.
        most_unused: pages of prompts and answers that are kept for later rows though none uses them, see
            prefix_index.py; 0: rows share nothing.
        window: tokens that a token sees at most, itself among them, in any layer; 0: all before it.
        first_unused: as many are kept at first, see PrefixIndex; None: ``most_unused``.
        reads_in_place: whether rows are read faster whose pages are contiguous: by torch, see PagedView.
        states: of rows; None: the model keeps none.

    Attributes:
        count: see above.
        window: see above.
        keeps_prefixes: whether rows share pages.
        states: see above.
        most_rows: rows in the batch at most. One more may be half run, see scheduling/chunks.py.
        prefixes: the pages that are known by their tokens.
        drafted: see PagePool.
    """

    def __init__(
        self,
        count: int,
        most_unused: int = 0,
        window: int = 0,
        first_unused: int | None = None,
        reads_in_place: bool = False,
        states: StatePool | None = None,
    ) -> None:
        self.count, self.window, self._reads_in_place = count, window, reads_in_place
        self.keeps_prefixes = most_unused > 0
        self.prefixes = PrefixIndex(most_unused, window, first_unused, states)
        self._pool = PagePool(range(1, count + 1))
        self.drafted = self._pool.drafted
        self._changes: list[tuple[RowPages, int, int]] = []  # row, column of its page table, page
        self._dirty: list[int] = []
        self.states = states
        self.most_rows = MOST_SLOTS if states is None else min(MOST_SLOTS, states.count - 1)

    @property
    def free(self) -> int:
        """The number of free pages, those that are held for rows or known by their tokens included."""
        return len(self._pool) + len(self.prefixes)

    def pages_before_window(self, position: int) -> int:
        """Return the number of leading pages that no later token attends to when a row's next token has this position.

        One such page is kept: a conversation may go back by a few tokens, and the last full page is found
        again by its beginning, see PrefixIndex.find.
        """
        return pages_before_window(position - PAGE, self.window)

    @property
    def most_kept(self) -> int:
        """The most pages that a row has at once where there is a window; one of them is to grow."""
        return pages_of(self.window + PAGE - 1) + 2

    def take(
        self,
        entries: int,
        most: int = 0,
        source: int = 0,
        saved: Sequence[int] = (),
        shared: Sequence[int] = (),
        unneeded: int = 0,
        is_copied: bool = False,
    ) -> RowPages:
        """Take the pages of a new row.

        Args:
            entries: that the row has at first.
            most: entries that it may have at the end; 0: no more.
            source: entries of its encoder's output.
            saved: pages that it begins with, see save.
            shared: known pages that it begins with, see PrefixIndex.find.
            unneeded: pages that it does without at its beginning, if it begins with none of these.
            is_copied: whether it may take pages to copy the known ones to, see copy_shared.

        Raises:
            EngineError: there are too few free pages, or no state is free; nothing was taken.
        """
        first = [*saved, *shared] or [0] * unneeded
        count, beyond = pages_of(entries) - len(first), pages_of(source)
        free = self.free - self.prefixes.count_unused(shared)
        if count + beyond > free:
            raise EngineError(f"{count + beyond} pages of the KV cache for a row; there are {free}")
        if self.states and not self.states.free:
            raise EngineError("a row more than there are states")
        self.prefixes.use(shared)
        self._evict(count + beyond)
        row, growth = RowPages(first, source=self._pool.take(beyond)), max(0, pages_of(most) - pages_of(entries))
        if is_copied and self._is_copied(shared, count):
            row.pages = []
            self._pool.allocate(row, len(shared) + count, growth)
            row.copies, row.pages[: len(shared)] = row.pages[: len(shared)], shared
        else:
            self._pool.allocate(row, max(0, count), growth)
        self._note_taken()
        if self.states:
            self.states.begin(row, shared[-1] if shared else 0)
        return row

    def _is_copied(self, shared: Sequence[int], count: int) -> bool:
        """Return whether a row of ``count`` pages after shared ones copies these: unless all its pages are contiguous.

        It shares them for good where less than half of all pages are free.
        """
        if not (shared and self._reads_in_place) or 0 in shared or 2 * self.free < self.count:
            return False
        is_contiguous = all(page + 1 == after for page, after in pairwise(shared))
        is_read_in_place = is_contiguous and self._pool.has_run(count, shared[-1])
        return not is_read_in_place and self._pool.has_run(len(shared) + count)

    def grow(self, row: RowPages, entries: int, unneeded: int = 0) -> bool:
        """Take the pages that a row lacks for some entries; false: there are too few, and nothing was taken.

        Args:
            row: which first gives back its first ``unneeded`` pages.
            entries: that it has then.
            unneeded: see ``pages_before_window``.
        """
        self._give_back(row, unneeded)
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

    def copy_shared(self, rows: Iterable[RowPages], copy: Callable[[Array], None]) -> None:
        """Return rows copies of the pages that they share, where they have taken pages for these.

        Args:
            rows: whose contexts have been run.
            copy: copies pages, int64 [2 (target, source), n].
        """
        copied = [row for row in rows if row.copies]
        if not copied:
            return
        copy(np.array([pair for row in copied for pair in zip(row.copies, row.pages, strict=False)]).T)
        for row in copied:
            shared, row.pages[: len(row.copies)] = row.pages[: len(row.copies)], row.copies
            self.drafted.update(to for to, of in zip(row.copies, shared, strict=True) if of in self.drafted)
            self._changes += [(row, column, page) for column, page in enumerate(row.copies)]
            row.copies = []
            self._release(shared)

    def _give_back(self, row: RowPages, count: int) -> None:
        """Free the first pages of a row that are not free yet."""
        first = next((column + 1 for column in reversed(range(count)) if not row.pages[column]), 0)
        if pages := row.pages[first:count]:
            row.pages[first:count] = [0] * len(pages)
            self._changes += [(row, column, 0) for column in range(first, count)]
            self._release(pages)

    def _release(self, pages: Sequence[int]) -> None:
        free, dirty = self.prefixes.release(pages)
        self._pool.free(free)
        self._dirty += dirty

    def _evict(self, count: int) -> None:
        """Free known pages until the pool has ``count`` at least."""
        if count > len(self._pool):
            self._pool.free(self.prefixes.evict(count - len(self._pool)))

    def _note_taken(self) -> None:
        """Drop stolen pages from the page tables of the rows that held them."""
        for row, column in self._pool.taken_from:
            self._changes.append((row, column, 0))
        self._pool.taken_from.clear()

    def take_changes(self) -> Array | None:
        """Return the slot, column and page of what the device's page tables lack, int64 [3, n]; None: nothing."""
        last = {(row.slot, column): page for row, column, page in self._changes if row.slot >= 0}
        self._changes.clear()
        return np.array([(*place, page) for place, page in last.items()]).T if last else None

    def take_dirty(self) -> list[int]:
        """Return the pages that were freed and must be cleared, because their numbers are not finite."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def release(self, rows: Iterable[RowPages]) -> None:
        """Free all pages and the states of rows."""
        for row in rows:
            self._pool.release(row)
            self._release(row.pages)
            self._pool.free([*row.source, *row.copies])
            if self.states:
                self.states.release(row)
            row.pages, row.source, row.copies, row.slot = [], [], [], -1

    def save(self, row: RowPages, entries: int) -> list[int]:
        """Take the pages of a row's first entries from it, before it is released."""
        count = pages_of(entries)
        saved, row.pages = row.pages[:count], row.pages[count:]
        return saved

    def free_saved(self, pages: Sequence[int]) -> None:
        """Free what save gave."""
        self._pool.free([page for page in pages if page])
