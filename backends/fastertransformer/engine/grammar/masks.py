"""Which tokens may follow in each of several rows, computed by the library's threads unless it takes little time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import EngineError
from .guided_row import GuidedRow

if TYPE_CHECKING:
    from llguidance import LLExecutor

Bits = npt.NDArray[np.uint8]  # [rows, mask_bytes], a bit for each token, the lowest of each byte first; 1 is allowed
_WORD_BYTES = 4
# Bits of all rows that are worth waking the library's threads, which takes some 100 us: those of four rows of a Llama.
_WORTH_BITS = 500_000


def mask_bytes(vocab_size: int) -> int:
    """Give the bytes of a row's bits: whole words, with at least a bit more than there are tokens."""
    return _WORD_BYTES * (vocab_size // (8 * _WORD_BYTES) + 1)


@cache
def _executor() -> LLExecutor:
    """Make the library's threads, which all engines of this process share."""
    from llguidance import LLExecutor

    return LLExecutor()


class RowMasks:
    """Follows some rows, and computes which tokens may follow in each.

    Args:
        rows: each has a grammar.
        vocab_size: of the model.
    """

    def __init__(self, rows: Sequence[GuidedRow], vocab_size: int) -> None:
        # The bit behind those of the tokens says that the text may be complete.
        self._rows, self._complete = rows, vocab_size & 7
        # A thread takes rows that are next to each other; those of one lexer would wait for each other in two threads.
        self._order = sorted(range(len(rows)), key=lambda at: id(rows[at].lexer))
        lexers, width = {id(row.lexer) for row in rows}, mask_bytes(vocab_size)
        self._is_threaded = len(lexers) > 1 and len(rows) * vocab_size >= _WORTH_BITS
        # Of each row with end tokens: the byte of that bit, and the byte and bit of each of them.
        self._ends = [
            (at * width + (vocab_size >> 3), [(at * width + (end >> 3), 1 << (end & 7)) for end in row.end_ids])
            for at, row in enumerate(rows)
            if row.end_ids
        ]

    def compute(self, tokens: Iterable[tuple[Sequence[int], Sequence[int]]], bits: Bits) -> None:
        """Set the bits of the tokens that may follow each row's: every token, once a row has ended.

        Args:
            tokens: of each row; the last of them, which its sequence does not have yet, apart.
            bits: are overwritten.

        Raises:
            EngineError: the library has failed.
        """
        new = [row.follow(*own) for row, own in zip(self._rows, tokens, strict=True)]
        consumed = [(self._rows[at].matcher, token) for at in self._order if (token := new[at]) is not None]
        live = [(self._rows[at].matcher, at) for at in self._order if not self._rows[at].has_ended]
        first, size = bits.ctypes.data, bits.shape[1]
        try:
            if not self._is_threaded:
                for matcher, token in consumed:
                    matcher.consume_token(token)
                for matcher, at in live:
                    matcher.unsafe_compute_mask_ptr(first + at * size, size)
            else:
                if consumed:
                    _executor().consume_token_par(consumed)
                if live:
                    _executor().unsafe_compute_mask_ptr(live, first, size, len(bits))
        except BaseException as error:  # a failure inside the library is no Exception
            raise EngineError(f"llguidance has failed: {error}") from None
        for row in self._rows:
            row.check()
        if len(live) < len(bits):
            bits[[row.has_ended for row in self._rows]] = 0xFF
        self._set_ends(bits)

    def _set_ends(self, bits: Bits) -> None:
        """Allow the tokens that end a row where its text may be complete, and nowhere else."""
        held = bits.data.cast("B")  # so few bytes are set sooner than numpy is called
        for complete, ends in self._ends:
            is_complete = held[complete] >> self._complete & 1
            for at, end in ends:
                held[at] = held[at] | end if is_complete else held[at] & ~end
