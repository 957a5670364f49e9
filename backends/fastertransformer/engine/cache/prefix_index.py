"""The prefix cache: pages are found again by the tokens in them and in all pages before them.

The keys and values of a full page depend on its tokens and on those before it alone. So each page that is known has a
key: the number of the page content before it, and its own tokens. Keys are compared as a whole, never by their hash
alone. A page that no row uses stays known until its memory is needed; that unused for longest is forgotten first.

A page that was never written to costs time: 2.5 ms a MB on a virtual machine whose host had to find the memory, as much
as a small model takes for the page's tokens. So a host keeps few unused pages at first, and one more for each that was
forgotten and is computed again.

Where tokens see a window only, a beginning is found by the pages that its next token sees. The content before them need
not be in a page any more: its key and number are remembered without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from ..arrays import Array
from .state_pool import StatePool

PAGE = 32  # tokens
_MOST_GONE = 1 << 16  # contents that are remembered without a page; each takes half a KiB of the host's memory


def pages_before_window(position: int, window: int) -> int:
    """Return how many of a row's first pages no token from a position on sees; window 0: each sees all before it."""
    return max(0, position + 1 - window) // PAGE if window else 0


class PageKey(NamedTuple):
    """What a page holds.

    Attributes:
        before: number of the content of the page before it; of a row's first the row's root, which is not above 0.
        tokens: its ids, as bytes.
    """

    before: int
    tokens: bytes


@dataclass
class _Known:
    """A page that is known.

    Attributes:
        key: its content; None: it is not found any more.
        number: of its content.
        uses: rows that use it.
        is_dirty: whether it holds numbers that are not finite.
    """

    key: PageKey | None
    number: int
    uses: int = 1
    is_dirty: bool = False


class PrefixIndex:
    """The pages that are known, those in use and those that are not.

    Args:
        most_unused: pages that are kept though no row uses them.
        window: tokens that a token sees, itself among them; 0: all before it.
        first_unused: as many of them are kept at first; None: all.
        states: of rows: a beginning is found where one is kept; None: the model keeps none.

    Attributes:
        fresh: pages that this step's prefill computes.
        queried: tokens that were looked for, so far.
        found: tokens of these that were found.
    """

    def __init__(
        self, most_unused: int, window: int = 0, first_unused: int | None = None, states: StatePool | None = None
    ) -> None:
        self._ceiling, self._window, self._states = most_unused, window, states
        self._most_unused = most_unused if first_unused is None else min(first_unused, most_unused)
        self._gone: dict[PageKey, int] = {}  # numbers of contents without a page; the oldest first
        self._pages: dict[PageKey, int] = {}
        self._known: dict[int, _Known] = {}
        self._unused: dict[int, None] = {}  # the longest unused first
        self._numbers = count(1)
        self.fresh: set[int] = set()
        self.queried = self.found = 0

    def __len__(self) -> int:
        return len(self._unused)

    def find(self, ids: Array, root: int = 0) -> list[int]:
        """Return the known pages of the longest beginning of some tokens, int64 [n]; 0 in place of those not needed.

        Rows with different roots share no page: other weights have made their keys and values.
        """
        pages: list[int] = []
        best = present = 0  # pages of the best beginning, and how many of the last ones are there
        for length, page in enumerate(self.walk(ids, root), 1):
            pages.append(page)
            present = present + 1 if page else 0
            is_seen = present >= length - pages_before_window(length * PAGE, self._window)
            if is_seen and (self._states is None or page in self._states):
                best = length
        unseen = pages_before_window(best * PAGE, self._window)
        return [0] * unseen + pages[unseen:best]

    def walk(self, ids: Array, root: int = 0) -> Iterator[int]:
        """Yield the pages of the longest known beginning of some tokens; 0 for content without a page."""
        before = root
        for tokens in _cut(ids):
            key = PageKey(before, tokens)
            page = self._pages.get(key, 0)
            if not (page or key in self._gone):
                return
            yield page
            before = self._known[page].number if page else self._gone[key]

    def count_unused(self, pages: Iterable[int]) -> int:
        """Return how many of these pages no row uses."""
        return sum(page in self._unused for page in pages)

    def use(self, pages: Iterable[int]) -> None:
        """Count one more row that uses known pages."""
        for page in filter(None, pages):
            self._known[page].uses += 1
            self._unused.pop(page, None)

    def add(self, pages: Sequence[int], ids: Array, root: int = 0, is_fresh: bool = False) -> None:
        """Make the full pages of a row known, whose tokens are these, int64 [n]; content that is known stays.

        Pages that the row does not have any more are 0.
        """
        before = root
        for page, tokens in zip(pages, _cut(ids), strict=False):
            key = PageKey(before, tokens)
            known = self._pages.get(key)
            if known is None and not page:
                before = self._remember(key, self._gone.pop(key, 0) or next(self._numbers))
                continue
            if known is None and page not in self._known:
                number = self._gone.pop(key, 0)
                if number and self._most_unused < self._ceiling:
                    self._most_unused += 1
                self._pages[key] = known = page
                self._known[page] = _Known(key, number or next(self._numbers))
                if is_fresh:
                    self.fresh.add(page)
            if known is None:  # it was forgotten
                return
            before = self._known[known].number

    def _remember(self, key: PageKey, number: int) -> int:
        """Remember a content that has no page, for the pages after it; returns its number."""
        self._gone[key] = number
        if len(self._gone) > _MOST_GONE:
            del self._gone[next(iter(self._gone))]
        return number

    def forget(self, pages: Iterable[int], is_dirty: bool) -> list[int]:
        """Withdraw pages from the index; returns those that other rows use, of which some may be dirty."""
        shared = []
        for page in pages:
            if known := self._known.get(page):
                if known.key:
                    self._lose(page, known.key)
                known.key = None
                if known.uses > 1:
                    known.is_dirty |= is_dirty
                    shared.append(page)
        return shared

    def _lose(self, page: int, key: PageKey) -> None:
        del self._pages[key]
        if self._states:
            self._states.forget(page)

    def release(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Count one row less that uses pages; returns those that are free now, and those of them that are dirty."""
        free, dirty = [], []
        for page in filter(None, reversed(pages)):  # what comes last in a row is worth least
            known = self._known.get(page)
            if known is None:
                free.append(page)
                continue
            known.uses -= 1
            if known.uses:
                continue
            if known.key:
                self._unused[page] = None
            else:
                del self._known[page]
                free.append(page)
                dirty += [page] if known.is_dirty else []
        return free + self.evict(len(self._unused) - self._most_unused), dirty

    def evict(self, count: int) -> list[int]:
        """Forget the pages that were unused for longest; returns them."""
        pages = [page for page, _ in zip(self._unused, range(count), strict=False)]
        for page in pages:
            del self._unused[page]
            known = self._known.pop(page)
            assert known.key
            self._lose(page, known.key)
            if self._window or self._most_unused < self._ceiling:
                self._remember(known.key, known.number)
        return pages


def _cut(ids: Array) -> Iterator[bytes]:
    """Return the tokens of each full page."""
    for first in range(0, len(ids) - PAGE + 1, PAGE):
        yield ids[first : first + PAGE].tobytes()
