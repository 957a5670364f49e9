"""Which sequences share a prefill pass."""

from __future__ import annotations

from ..cache.block_manager import BlockManager
from .paging import tokens_found, tokens_to_run
from .sequence import Sequence

# Of one prefill pass, padding and the rows that decode in it included: bounds its memory and how long it delays others.
# A few tokens more would take another tile of every product.
_PREFILL_TOKENS = 4096
_HELD_TOKENS = 8 * _PREFILL_TOKENS  # that the rows of one pass continue, padding included


def is_one_pass(new: list[Sequence], decoding: int, blocks: BlockManager) -> bool:
    """Say whether the contexts of new sequences are run in one prefill pass, beside ``decoding`` rows."""
    if len(new) == 1:
        return True
    found = [tokens_found(each, blocks) for each in new]
    sizes = [(each.start + known, tokens_to_run(each, known)) for each, known in zip(new, found, strict=True)]
    # Rows that continue what is in the cache already are padded to the longest on the device, and so is that.
    continued = [(before, tokens) for before, tokens in sizes if before]
    padded = len(continued) * max((tokens for _, tokens in continued), default=0)
    held = len(continued) * max((before for before, _ in continued), default=0)
    tokens = padded + sum(tokens for before, tokens in sizes if not before)
    is_alone = any(_is_prefilled_alone(each) for each in new)
    return decoding + tokens <= _PREFILL_TOKENS and held <= _HELD_TOKENS and not is_alone


def _is_prefilled_alone(sequence: Sequence) -> bool:
    """Say whether no other sequence shares its prefill: of one that failed, a session, set-back beams, a last chunk."""
    is_special = sequence.session_row is not None or (sequence.count > 0 and sequence.width > 1)
    return is_special or sequence.isolate_until is not None or bool(sequence.chunks)
