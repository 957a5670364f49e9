"""The pages of the KV cache that a sequence needs: to join the batch, and with each token."""

from __future__ import annotations

from ..cache.block_manager import PAGE, BlockManager, pages_of
from ..cache.sizing import UNBOUNDED
from .sequence import Sequence


def pages_to_begin(sequence: Sequence) -> int:
    """Give the free pages that it takes to join the batch: for its context, and the first page that each beam grows."""
    own = min(pages_of(sequence.first_entries) + 1, pages_of(sequence.max_entries))
    row = sequence.session_row
    return sequence.width * (own + pages_of(sequence.source_length)) - len((row and row.saved) or ())


def pages_to_grow(sequence: Sequence) -> int:
    """Give the pages that its beams take at once when they grow; 0: they have all that they will ever need."""
    return 0 if sequence.room == UNBOUNDED else sequence.width


def take_pages(sequence: Sequence, blocks: BlockManager) -> None:
    """Take the pages that its context needs."""
    saved, row = list[int](), sequence.session_row
    if row:
        sequence.lacks_past = sequence.start > 0 and row.saved is None
        saved, row.saved = row.saved or [], None
    sizes = sequence.first_entries, sequence.max_entries, sequence.source_length
    for _ in range(sequence.width):
        sequence.pages.append(blocks.take(*sizes, saved))
    _measure_room(sequence)


def grow(sequence: Sequence, blocks: BlockManager) -> bool:
    """Take the pages that the next launched token needs; false: there are too few."""
    entries = min(sequence.cached + 1, sequence.max_entries)
    has_grown = all(blocks.grow(pages, entries) for pages in sequence.pages)
    _measure_room(sequence)
    return has_grown


def free_pages(sequence: Sequence, blocks: BlockManager) -> None:
    """Free its pages."""
    blocks.release(sequence.pages)
    sequence.pages = []


def _measure_room(sequence: Sequence) -> None:
    entries = PAGE * min(len(each.pages) for each in sequence.pages)
    sequence.room = entries - sequence.start - len(sequence.context.ids) + 1
    if entries >= sequence.max_entries:
        sequence.room = UNBOUNDED
