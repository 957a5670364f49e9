"""Where copies of a row's state are kept, so that later rows begin with them; see cache/state_pool.py."""

from __future__ import annotations

from ..arrays import Array
from ..cache.page_allocator import PAGE, PageAllocator
from ..cache.page_pool import RowPages
from ..cache.state_pool import LEAST_KEPT

StateCopy = tuple[int, int]  # target, source


class KeptState:
    """The copies that one row leaves.

    Args:
        allocator: has the states, and the pages behind which copies are kept.
        root: what pages of the row begin with; see PrefixIndex.find.

    Attributes:
        cuts: entries of its context after which the state is to be kept; they are run in a pass of their own.
    """

    def __init__(self, allocator: PageAllocator, root: int) -> None:
        self._states, self._prefixes, self._root = allocator.states, allocator.prefixes, root
        self.cuts: list[int] = []
        self._pages: list[int] = []  # behind which copies were kept; maybe another row's
        self._last = 0  # entries

    def begin(self, entries: Array, known: int, is_kept: bool) -> None:
        """Choose the cuts of a context: where it leaves what is known, and its last page end.

        Args:
            entries: of the context, but for the last one.
            known: entries that it has already.
            is_kept: whether any copy is kept.
        """
        self.cuts, self._pages, self._last = [], [], known
        if not is_kept:
            return
        leaves = sum(1 for _ in self._prefixes.walk(entries, self._root)) * PAGE
        for cut in sorted({leaves, len(entries) // PAGE * PAGE}):
            if cut - known >= LEAST_KEPT:
                self.cuts.append(known := cut)

    def keep(self, row: RowPages, entries: Array) -> StateCopy | None:
        """Return what is to be copied once these entries of its context were run; None: nothing."""
        states, end = self._states, len(entries)
        self.cuts, is_cut = [cut for cut in self.cuts if cut > end], end in self.cuts
        if not states or end % PAGE or not (is_cut or end - self._last >= states.interval):
            return None
        self._last, page = end, self._page_before(entries)
        if not (page and (state := states.keep(page))):
            return None
        self._pages.append(page)
        return state, row.state

    def follow(self, row: RowPages, cached: int) -> StateCopy | None:
        """Return what is to be copied while it decodes, before the token behind ``cached`` entries; None: nothing."""
        if cached == row.trail_end or not (self._states and (trail := self._states.follow(row, cached))):
            return None
        return trail, row.state

    def publish(self, row: RowPages, entries: Array) -> None:
        """Keep what has followed the row, whose pages are known; one that has ended may have taken a surplus token."""
        if self._states and 0 < row.trail_end <= len(entries):
            self._states.keep_trail(row, self._page_before(entries[: row.trail_end]))

    def _page_before(self, entries: Array) -> int:
        """Return the known page that ends with these entries; 0: there is none."""
        pages = list(self._prefixes.walk(entries, self._root))
        return pages[-1] if len(pages) * PAGE == len(entries) else 0

    def forget(self) -> None:
        """Forget what was kept of it, because it has failed."""
        for page in self._pages:
            assert self._states
            self._states.forget(page)
