"""Which states are in use, on the host of rank 0: those of rows, and those that are kept where a known page ends.

A page's keys and values can be shared because nothing after it changes them. A row's state is changed by every token,
so one is copied where the prefix cache is to find it: at the end of a full page, and with that page it is forgotten. A
later row that begins with the page's tokens, and with all before them, begins with a copy.

States are kept after a context's last full page, where a context leaves what is known, as those do that begin with the
same instructions, and after some chunks of a long one. While a row decodes, its last page end is followed by one copy,
its trail, which is kept when the row ends: a conversation goes on there. Kept states and trails are free for rows: a
row that needs one takes that which was not used for longest.
"""

from __future__ import annotations

from .page_pool import RowPages

LEAST_KEPT = 128  # tokens that a copy saves, at least: for its place, a context is run in two passes in place of one
_LONGEST_PART = 4  # the chunks of the longest context take a fourth of what is kept


class StatePool:
    """The states of all rows.

    Args:
        count: of states, numbered from 1.
        most_kept: that are kept beside those of rows, trails included.
        longest: tokens that a row has at most.

    Attributes:
        count: see above.
        interval: tokens between two states that the chunks of one context leave.
    """

    def __init__(self, count: int, most_kept: int = 0, longest: int = 0) -> None:
        self.count, self._most_kept = count, most_kept
        self.interval = max(LEAST_KEPT, _LONGEST_PART * longest // max(1, most_kept))
        self._free = list(range(count, 0, -1))
        self._kept: dict[int, int] = {}  # by page; the longest unused first
        self._trails: dict[RowPages, None] = {}  # rows that have one; the oldest first

    def __contains__(self, page: int) -> bool:
        return page in self._kept

    @property
    def free(self) -> int:
        """The number of states that no row uses, those that are kept included."""
        return len(self._free) + len(self._kept) + len(self._trails)

    def begin(self, row: RowPages, page: int = 0) -> None:
        """Take the state of a new row, of which there must be one free; it begins with that of a page, if not 0."""
        row.origin = self._kept.pop(page) if page else 0
        row.state = self._take() or self._take_trail()
        if row.origin and row.state:
            self._kept[page] = row.origin
        elif row.origin:  # the last one: the row goes on in it
            row.state, row.origin = row.origin, 0

    def _take(self) -> int:
        """Take a free state, or that which was kept unused for longest; 0: there is none."""
        if not self._free and self._kept:
            self.forget(next(iter(self._kept)))
        return self._free.pop() if self._free else 0

    def _take_trail(self) -> int:
        row = next(iter(self._trails), None)
        return self._end_trail(row) if row else 0

    def _end_trail(self, row: RowPages) -> int:
        del self._trails[row]
        state, row.trail = row.trail, 0
        return state

    def _take_to_keep(self) -> int:
        """Take a state to keep; 0: there is none."""
        if len(self._kept) + len(self._trails) >= self._most_kept:
            if not self._kept:
                return 0
            self.forget(next(iter(self._kept)))
        return self._take()

    def keep(self, page: int) -> int:
        """Return the state to which a row's is to be copied as that after a page; 0: to none."""
        state = 0 if page in self._kept else self._take_to_keep()
        if state:
            self._kept[page] = state
        return state

    def follow(self, row: RowPages, tokens: int) -> int:
        """Return the state to which a row's is to be copied after its first ``tokens``, as its trail; 0: to none."""
        if not row.trail and (state := self._take_to_keep()):
            row.trail = state
            self._trails[row] = None
        row.trail_end = tokens
        return row.trail

    def keep_trail(self, row: RowPages, page: int) -> None:
        """Keep a row's trail as the state after a page, which is known."""
        if row.trail and page not in self._kept:
            self._kept[page] = self._end_trail(row)

    def forget(self, page: int) -> None:
        """Free what is kept of a page."""
        if state := self._kept.pop(page, 0):
            self._free.append(state)

    def release(self, row: RowPages) -> None:
        """Free the state of a row, and its trail."""
        self._free += [state for state in (row.state, self._end_trail(row) if row.trail else 0) if state]
        row.state = row.origin = 0
