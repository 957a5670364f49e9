"""The pages of the KV cache that a sequence needs, to join the batch and with each token, and those that it shares."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..arrays import UNBOUNDED, Array
from ..cache.block_manager import PAGE, BlockManager, pages_of
from ..cache.prefix_index import pages_behind
from ..rows.sequence import Sequence

NEW_ROWS, CONTINUED_ROWS, SHARING_ROWS = range(3)  # stages of a prefill pass


def takes_part(sequence: Sequence) -> bool:
    """Say whether the keys and values of its first beam are determined by its tokens, and all of them kept."""
    is_plain = sequence.session_row is None and sequence.source is None
    return is_plain and sequence.context.embeddings is None and sequence.window == UNBOUNDED


def find_known(sequence: Sequence, blocks: BlockManager) -> list[int]:
    """Find the pages of its context's beginning that are known; its last token is always run."""
    is_wanted = sequence.width == 1 if sequence.count else not sequence.needs_hidden  # later, its beams differ
    if not (blocks.keeps_prefixes and is_wanted and takes_part(sequence)):
        return []
    known = blocks.prefixes.find(_entries(sequence)[:-1])
    if blocks.window and _pages_for(sequence, known, blocks) > blocks.free:  # to run all of it may take fewer
        return []
    return known if len(known) * PAGE > sequence.start else []


def lacks_read_pages(sequence: Sequence, blocks: BlockManager) -> bool:
    """Say whether the row lacks pages that a pass over the rest of its context would read, if that pass reads pages.

    A new row does without pages that only a prefill from its own keys and values leaves unread; see ``_unneeded``.
    """
    behind = pages_behind(sequence.start + sequence.skipped, blocks.window)
    return any(0 in row.pages[behind:] for row in sequence.pages)


def _unneeded(sequence: Sequence, blocks: BlockManager, entries: int) -> int:
    """Give how many pages a new row does without when these entries are of one pass, which reads none.

    So such a row has a pass of its own: one in which other rows decode reads the pages; see Batch._choose_extend.
    """
    is_new = sequence.start == 0 and sequence.session_row is None
    return blocks.unneeded(entries) if is_new else 0


def _pages_for(sequence: Sequence, known: list[int], blocks: BlockManager) -> int:
    """Give the free pages that it takes to join the batch, if it begins with known ones: see pages_to_begin."""
    own = min(pages_of(sequence.first_entries) + 1, pages_of(sequence.max_entries))
    own -= len(known) or _unneeded(sequence, blocks, sequence.first_entries)
    return sequence.width * (own + pages_of(sequence.source_length)) + blocks.prefixes.count_unused(known)


def most_entries(sequence: Sequence, blocks: BlockManager) -> int:
    """Give the entries that each of its beams has room for at once, at most."""
    if not blocks.window or sequence.window != UNBOUNDED:
        return sequence.max_entries
    begins_with_all = sequence.start > 0 or sequence.session_row is not None
    first = pages_of(sequence.first_entries) + 1 if begins_with_all else 0
    return min(sequence.max_entries, PAGE * max(first, blocks.most_kept))


def _entries(sequence: Sequence) -> Array:
    """Give what determines the entries of its context: tokens, before which a prefix prompt's have negative numbers."""
    ids = sequence.inputs()
    return np.concatenate((np.full(sequence.start, -1 - sequence.context.prefix), ids)) if sequence.start else ids


def tokens_found(sequence: Sequence, blocks: BlockManager) -> int:
    """Give how many tokens of its context need not be run, because their pages are known."""
    if sequence.pages:
        return sequence.skipped
    return max(0, len(find_known(sequence, blocks)) * PAGE - sequence.start)


def tokens_to_run(sequence: Sequence, found: int) -> int:
    """Give how many tokens its prefill runs, of its context or of its encoder's input, if ``found`` are known."""
    return max(len(sequence.context.ids) + sequence.count - found, sequence.source_length)


def pages_to_begin(sequence: Sequence, blocks: BlockManager) -> int:
    """Give the free pages that it takes to join the batch: for its context, and the first page that each beam grows."""
    if sequence.pages:  # of the chunks that were run
        own, pages = min(pages_of(sequence.first_entries) + 1, pages_of(sequence.max_entries)), sequence.pages[0].pages
        return own - len(pages) + (sequence.width - 1) * (own - pages.count(0))
    row = sequence.session_row
    return _pages_for(sequence, find_known(sequence, blocks), blocks) - len((row and row.saved) or ())


def pages_to_grow(sequence: Sequence) -> int:
    """Give the pages that its beams take at once when they grow; 0: they have all that they will ever need."""
    return 0 if sequence.room == UNBOUNDED else sequence.width


def pages_of_chunk(sequence: Sequence, tokens: int, blocks: BlockManager) -> int:
    """Give the free pages that it takes to run the next ``tokens`` of its context; 0: all that are left."""
    entries = _entries_after(sequence, tokens, blocks)
    if sequence.pages:
        return pages_of(entries) - len(sequence.pages[0].pages)
    row, known = sequence.session_row, find_known(sequence, blocks)
    own = len((row and row.saved) or known) or _unneeded(sequence, blocks, entries)
    return pages_of(entries) - own + blocks.prefixes.count_unused(known)


def _entries_after(sequence: Sequence, tokens: int, blocks: BlockManager) -> int:
    """Give the entries of its first beam when the next ``tokens`` of its context were run; 0: all that are left."""
    return sequence.start + tokens_found(sequence, blocks) + tokens if tokens else sequence.first_entries


def take_pages(sequence: Sequence, blocks: BlockManager, tokens: int = 0) -> None:
    """Take the pages for the next ``tokens`` of its context, or all that are left; share those that are known."""
    entries, known = _entries_after(sequence, tokens, blocks), list[int]()
    if sequence.pages:
        blocks.grow(sequence.pages[0], entries)
        unneeded = sequence.pages[0].pages.count(0)
    else:
        known, unneeded = _begin(sequence, blocks, entries)
    sizes = entries, sequence.max_entries, sequence.source_length
    for _ in range(1, 1 if tokens else sequence.width):
        sequence.pages.append(blocks.take(*sizes, (), known, unneeded))
    _measure_room(sequence)
    if not blocks.keeps_prefixes or not takes_part(sequence):
        return
    if blocks.prefixes.fresh.isdisjoint(known):
        blocks.prefixes.add(sequence.pages[0].pages, _entries(sequence)[:entries], is_fresh=True)
    else:
        sequence.stage = SHARING_ROWS


def _begin(sequence: Sequence, blocks: BlockManager, entries: int) -> tuple[list[int], int]:
    """Take the pages of its first beam; returns those that are known, and how many a new one does without."""
    saved, row, known = list[int](), sequence.session_row, find_known(sequence, blocks)
    if row:
        sequence.lacks_past = sequence.start > 0 and row.saved is None
        saved, row.saved = row.saved or [], None
    unneeded = _unneeded(sequence, blocks, entries)
    sizes = entries, sequence.max_entries, sequence.source_length
    is_copied = sequence.width == 1 and sequence.max_tokens > 1  # every step but the first reads all of its pages
    sequence.pages.append(blocks.take(*sizes, saved, known, unneeded, is_copied))
    sequence.skipped = max(0, len(known) * PAGE - sequence.start)
    sequence.stage = CONTINUED_ROWS if sequence.start + sequence.skipped else NEW_ROWS
    if blocks.keeps_prefixes and takes_part(sequence):
        blocks.prefixes.queried += len(sequence.context.ids) + sequence.count
        blocks.prefixes.found += sequence.skipped
    return known, unneeded


def give_back(sequence: Sequence, blocks: BlockManager) -> None:
    """Free the pages of a half-run context that what is left of it does not see."""
    entries = sequence.start + sequence.skipped
    blocks.grow(sequence.pages[0], entries, blocks.unneeded(entries))


def keep_known(sequence: Sequence, blocks: BlockManager) -> None:
    """Make known what is in its full pages, for later rows: its context, and the tokens that it has generated."""
    if blocks.keeps_prefixes and takes_part(sequence) and sequence.pages:
        entries = _entries(sequence)
        if sequence.count:  # its last token has not been run
            entries = entries[: -1 if sequence.width == 1 else -sequence.count]
        blocks.prefixes.add(sequence.pages[0].pages, entries)


def forget_known(sequences: Iterable[Sequence], blocks: BlockManager, is_dirty: bool = False) -> list[int]:
    """Let the pages of sequences that have failed not be found any more; returns those that other rows use."""
    rows = [row for sequence in sequences for row in sequence.pages]
    return blocks.prefixes.forget(dict.fromkeys(page for row in rows for page in row.pages), is_dirty)


def grow(sequence: Sequence, blocks: BlockManager) -> bool:
    """Take the pages that the next launched token needs; false: there are too few."""
    entries = min(sequence.cached + 1, sequence.max_entries)
    unneeded = blocks.unneeded(entries - 1) if sequence.window == UNBOUNDED else 0
    has_grown = all(blocks.grow(pages, entries, unneeded) for pages in sequence.pages)
    _measure_room(sequence)
    return has_grown


def free_pages(sequence: Sequence, blocks: BlockManager) -> None:
    """Free its pages."""
    blocks.release(sequence.pages)
    sequence.pages, sequence.chunks = [], []


def _measure_room(sequence: Sequence) -> None:
    entries = PAGE * len(sequence.pages[-1].pages)  # the last beam's grow last
    sequence.room = entries - sequence.start - len(sequence.context.ids) + 1
    if entries >= sequence.max_entries:
        sequence.room = UNBOUNDED
