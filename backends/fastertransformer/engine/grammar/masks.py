"""Which tokens may follow in each of several rows, computed by the library's threads.

The library works without Python's global lock, so the masks may be computed in a thread while the network runs.
"""

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
Indices = npt.NDArray[np.int64]
_WORD_BYTES = 4


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
        self._rows, self._complete = rows, vocab_size
        # A thread takes rows that are next to each other; those of one lexer would wait for each other in two threads.
        self._order = sorted(range(len(rows)), key=lambda at: id(rows[at].lexer))
        # Where the first end token of each row that has one is, then the second ones and so on: row, byte and bit.
        most = max((len(row.end_ids) for row in rows), default=0)
        self._ends = [_bits_of([(at, row.end_ids[rank:]) for at, row in enumerate(rows)]) for rank in range(most)]

    def compute(self, tokens: Iterable[tuple[Sequence[int], Sequence[int]]], bits: Bits) -> None:
        """Set the bits of the tokens that may follow each row's: every token, once a row has ended.

        Args:
            tokens: of each row; the last of them, which its sequence does not have yet, apart.
            bits: are overwritten.

        Raises:
            EngineError: the library has failed.
        """
        new = [(row, row.follow(*own)) for row, own in zip(self._rows, tokens, strict=True)]
        ordered = [(at, *new[at]) for at in self._order]
        consumed = [(row.matcher, token) for _, row, token in ordered if token is not None]
        live = [(row.matcher, at) for at, row, _ in ordered if not row.has_ended]
        try:
            if consumed:
                _executor().consume_token_par(consumed)
            if live:
                _executor().unsafe_compute_mask_ptr(live, bits.ctypes.data, bits.shape[1], len(bits))
        except BaseException as error:  # a failure inside the library is no Exception
            raise EngineError(f"llguidance has failed: {error}") from None
        for row in self._rows:
            row.check()
        if len(live) < len(bits):
            bits[[row.has_ended for row in self._rows]] = 0xFF
        self._set_ends(bits)

    def _set_ends(self, bits: Bits) -> None:
        """Allow the tokens that end a row where its text may be complete, and nowhere else."""
        is_complete = bits[:, self._complete >> 3] >> (self._complete & 7) & 1
        for rows, columns, ends in self._ends:
            bits[rows, columns] = bits[rows, columns] & ~ends | is_complete[rows] * ends


def _bits_of(tokens: Iterable[tuple[int, Sequence[int]]]) -> tuple[Indices, Indices, Bits]:
    """Give the rows that have a token left, and the byte and the bit of each one's first: [n] each."""
    rows, ids = np.array([(row, left[0]) for row, left in tokens if left], np.int64).T
    return rows, ids >> 3, (1 << (ids & 7)).astype(np.uint8)
