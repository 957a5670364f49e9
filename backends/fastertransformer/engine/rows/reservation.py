"""The pages of the KV cache that a sequence has, needs to join the batch and with each token, and shares."""

from __future__ import annotations

from enum import IntEnum
from weakref import proxy

import numpy as np

from ..arrays import UNBOUNDED, Array
from ..cache.page_allocator import PAGE, PageAllocator, pages_of
from ..cache.page_pool import RowPages
from ..cache.prefix_index import pages_before_window
from .kept_state import KeptState, StateCopy
from .transcript import Transcript


class Stage(IntEnum):
    """The part of a prefill pass in which a context is run; see scheduling/contexts.py."""

    NEW = 0
    CONTINUED = 1  # goes on from what is in the cache
    SHARING = 2  # goes on from what another row of the same pass computes


class Reservation:
    """The pages of one sequence.

    Attributes:
        rows: the pages of each beam; only the first beam's while its context is run in chunks. Empty: it has none.
        room: it has pages for as many launched tokens.
        skipped: tokens of its context whose keys and values were found in the prefix cache, or run as chunks.
        stage: of its prefill pass.
        kept: copies of its state that others begin with.
        lacks_past: whether the session's entries were lost, and must be computed again.
    """

    def __init__(self, row: Transcript, allocator: PageAllocator) -> None:
        # The row has it: a cycle would keep both until Python looks for garbage.
        self._row: Transcript = proxy(row)
        self._allocator = allocator
        self.rows: list[RowPages] = []
        self.room = self.skipped = 0
        self.stage = Stage.NEW
        self.lacks_past = False
        self.kept = KeptState(allocator, row.root)

    @property
    def _is_shareable(self) -> bool:
        """Whether its first beam's keys and values are determined by its tokens, and all kept, for others to share."""
        row = self._row
        is_plain = row.session_row is None and row.source is None
        is_whole = row.context.embeddings is None and row.window == UNBOUNDED
        return self._allocator.keeps_prefixes and is_plain and is_whole

    @property
    def _entries(self) -> Array:
        """What determines the entries of its context: tokens, before which a prefix prompt's have negative numbers."""
        ids, row = self._row.inputs(), self._row
        return np.concatenate((np.full(row.start, -1 - row.context.prefix), ids)) if row.start else ids

    @property
    def _may_begin_known(self) -> bool:
        row = self._row
        is_wanted = row.width == 1 if row.count else not row.needs_hidden  # later, its beams differ
        return is_wanted and self._is_shareable

    @property
    def _keeps_state(self) -> bool:
        """Whether copies of its state are kept; where pages are given back, none is."""
        return self._allocator.states is not None and not self._allocator.window and self._may_begin_known

    def _find_known(self) -> list[int]:
        """Find the pages of its context's beginning that are known; its last token is always run."""
        row, allocator = self._row, self._allocator
        if not self._may_begin_known:
            return []
        known = allocator.prefixes.find(self._entries[:-1], row.root)
        if allocator.window and self._pages_for(known) > allocator.free:  # to run all of it may take fewer
            return []
        return known if len(known) * PAGE > row.start else []

    def _unneeded(self, entries: int) -> int:
        """Return how many pages a new row does without when these entries are of one pass, which reads none.

        So such a row has a pass of its own: one in which other rows decode reads the pages; see Batch._choose_extend.
        """
        is_new = self._row.start == 0 and self._row.session_row is None
        return self._allocator.pages_before_window(entries) if is_new else 0

    @property
    def _first_pages(self) -> int:
        """Pages that a beam has with its context and the first page that it grows."""
        return min(pages_of(self._row.first_entries) + 1, pages_of(self._row.max_entries))

    def _pages_for(self, known: list[int]) -> int:
        """Return the free pages that it takes to join the batch, if it begins with known ones: see pages_to_begin."""
        own = self._first_pages - (len(known) or self._unneeded(self._row.first_entries))
        source = pages_of(self._row.source_length)
        return self._row.width * (own + source) + self._allocator.prefixes.count_unused(known)

    @property
    def most_entries(self) -> int:
        """Entries that each of its beams has room for at once, at most."""
        row, allocator = self._row, self._allocator
        if not allocator.window or row.window != UNBOUNDED:
            return row.max_entries
        begins_with_all = row.start > 0 or row.session_row is not None
        first = pages_of(row.first_entries) + 1 if begins_with_all else 0
        return min(row.max_entries, PAGE * max(first, allocator.most_kept))

    @property
    def tokens_found(self) -> int:
        """Tokens of its context that need not be run, because their pages are known."""
        if self.rows:
            return self.skipped
        return max(0, len(self._find_known()) * PAGE - self._row.start)

    @property
    def pages_to_begin(self) -> int:
        """Free pages that it takes to join the batch: for its context, and the first page that each beam grows."""
        if self.rows:  # of the chunks that were run
            own, pages = self._first_pages, self.rows[0].pages
            return own - len(pages) + (self._row.width - 1) * (own - pages.count(0))
        row = self._row.session_row
        return self._pages_for(self._find_known()) - len((row and row.saved) or ())

    @property
    def pages_to_grow(self) -> int:
        """Pages that its beams take at once when they grow; 0: they have all that they will ever need."""
        return 0 if self.room == UNBOUNDED else self._row.width

    def pages_of_chunk(self, tokens: int) -> int:
        """Return the free pages that it takes to run the next ``tokens`` of its context; 0: all that are left."""
        entries = self._entries_after(tokens)
        if self.rows:
            return pages_of(entries) - len(self.rows[0].pages)
        row, known = self._row.session_row, self._find_known()
        own = len((row and row.saved) or known) or self._unneeded(entries)
        return pages_of(entries) - own + self._allocator.prefixes.count_unused(known)

    def _entries_after(self, tokens: int) -> int:
        """Return its first beam's entries when the next ``tokens`` of its context were run; 0: all that are left."""
        return self._row.start + self.tokens_found + tokens if tokens else self._row.first_entries

    def take(self, tokens: int) -> None:
        """Take the pages for the next ``tokens`` of its context, or all that are left; share those that are known."""
        row, allocator = self._row, self._allocator
        entries, known = self._entries_after(tokens), list[int]()
        if self.rows:
            allocator.grow(self.rows[0], entries)
            unneeded = self.rows[0].pages.count(0)
        else:
            known, unneeded = self._begin(entries)
        for _ in range(1, 1 if tokens else row.width):
            self.rows.append(
                allocator.take(entries, row.max_entries, source=row.source_length, shared=known, unneeded=unneeded)
            )
        self._measure_room()
        if not self._is_shareable:
            return
        if allocator.prefixes.fresh.isdisjoint(known):
            allocator.prefixes.add(self.rows[0].pages, self._entries[:entries], row.root, is_fresh=True)
        else:  # none of it is run before what it shares
            self.stage, self.kept.cuts = Stage.SHARING, []

    def _begin(self, entries: int) -> tuple[list[int], int]:
        """Take the pages of its first beam; returns those that are known, and how many a new one does without."""
        row, saved, known = self._row, list[int](), self._find_known()
        if row.session_row:
            self.lacks_past = row.start > 0 and row.session_row.saved is None
            saved = row.session_row.take_saved()
        unneeded = self._unneeded(entries)
        self.rows.append(
            self._allocator.take(
                entries,
                row.max_entries,
                source=row.source_length,
                saved=saved,
                shared=known,
                unneeded=unneeded,
                is_copied=row.width == 1 and row.max_tokens > 1,  # every step but the first reads all of its pages
            )
        )
        self.skipped = max(0, len(known) * PAGE - row.start)
        self.stage = Stage.CONTINUED if row.start + self.skipped else Stage.NEW
        self.kept.begin(self._entries[:-1], row.start + self.skipped, self._keeps_state)
        if self.kept.cuts:
            self.stage = Stage.CONTINUED
        if self._is_shareable:
            self._allocator.prefixes.queried += len(row.context.ids) + row.count
            self._allocator.prefixes.found += self.skipped
        return known, unneeded

    @property
    def begin_of_last_pass(self) -> int:
        """Tokens of its context that are known, or run before its last pass."""
        return self.kept.cuts[-1] - self._row.start if self.kept.cuts else self.skipped

    def end_chunk(self, tokens: int) -> int:
        """Return how many of the next ``tokens`` of its context a chunk has: it ends where the state can be kept."""
        if not self._keeps_state:
            return tokens
        begin = self._row.start + self.tokens_found
        end = (begin + tokens) // PAGE * PAGE
        return end - begin if end > begin else tokens

    def keep_state(self) -> StateCopy | None:
        """Return what is to be copied of its state, after what was run of its context."""
        entries = self._entries[: self._row.start + self.skipped]
        return self.kept.keep(self.rows[0], entries) if self._keeps_state else None

    def follow(self) -> StateCopy | None:
        """Return what is to be copied of its state before its next token is launched."""
        cached = self._row.cached
        if cached % PAGE or self._row.width > 1 or not self._keeps_state:
            return None
        return self.kept.follow(self.rows[0], cached)

    @property
    def lacks_read_pages(self) -> bool:
        """Whether it lacks pages that a pass over the rest of its context would read, if that pass reads pages.

        A new row does without pages that only a prefill from its own keys and values leaves unread; see ``_unneeded``.
        """
        first = pages_before_window(self._row.start + self.skipped, self._allocator.window)
        return any(0 in row.pages[first:] for row in self.rows)

    def note_chunk(self, tokens: int) -> None:
        """Count tokens of its context that were run."""
        self.skipped, self.stage = self.skipped + tokens, Stage.CONTINUED

    def give_back(self) -> None:
        """Free the pages of a half-run context that what is left of it does not see."""
        entries = self._row.start + self.skipped
        self._allocator.grow(self.rows[0], entries, self._allocator.pages_before_window(entries))

    def publish(self) -> None:
        """Publish its full pages to the prefix cache: of its context, and of the tokens that it has generated."""
        row = self._row
        if self.rows and self._is_shareable:
            entries = self._entries
            if row.count:  # its last token has not been run
                entries = entries[: -1 if row.width == 1 else -row.count]
            self._allocator.prefixes.add(self.rows[0].pages, entries, row.root)
            self.kept.publish(self.rows[0], entries)

    def grow(self) -> bool:
        """Take the pages that the next launched token needs; false: there are too few."""
        row, allocator = self._row, self._allocator
        entries = min(row.cached + 1, row.max_entries)
        unneeded = allocator.pages_before_window(entries - 1) if row.window == UNBOUNDED else 0
        has_grown = all(allocator.grow(pages, entries, unneeded) for pages in self.rows)
        self._measure_room()
        return has_grown

    def room_for_draft(self, tokens: int) -> int:
        """Take pages for the tokens of a draft after the next launched one; returns how many of them have room.

        What the step writes of those that are wrong is overwritten before it is read. Where copies of the row's state
        are kept at ends of pages, a draft is not to pass one.
        """
        if self._keeps_state:
            tokens = min(tokens, PAGE - 1 - self._row.cached % PAGE)
        if self.room - self._row.launched - 1 < tokens:
            entries = min(self._row.cached + 1 + tokens, self._row.max_entries)
            if self._allocator.grow(self.rows[0], entries):
                self._measure_room()
        return max(0, min(tokens, self.room - self._row.launched - 1))

    def save(self, entries: int) -> tuple[int, list[int] | None]:
        """Give up the pages of its first entries for a session; returns how many there are, and the pages.

        Where rows have states nothing is saved: a state has seen tokens that the session may go back by.
        """
        if self.room != UNBOUNDED:  # its last step had no page to write to
            entries = min(entries, PAGE * len(self.rows[0].pages))
        if self._allocator.states:
            return entries, None
        return entries, self._allocator.save(self.rows[0], min(entries, self._row.window))

    def release(self) -> None:
        """Free its pages."""
        self._allocator.release(self.rows)
        self.rows = []

    def _measure_room(self) -> None:
        entries = PAGE * len(self.rows[-1].pages)  # the last beam's grow last
        self.room = entries - self._row.start - len(self._row.context.ids) + 1
        if entries >= self._row.max_entries:
            self.room = UNBOUNDED
