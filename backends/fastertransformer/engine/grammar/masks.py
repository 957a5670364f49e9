"""Which tokens may follow in each of several rows, computed by the library's threads unless it takes little time."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import EngineError
from .guided_row import TOO_SLOW, GuidedRow
from .library import LARGE_STACK_BYTES

if TYPE_CHECKING:
    from llguidance import LLExecutor

_log = logging.getLogger(__name__)
Bits = npt.NDArray[np.uint8]  # [rows, mask_bytes], a bit for each token, the lowest of each byte first; 1 is allowed
_WORD_BYTES = 4
# Bits of all rows that are worth waking the library's threads, which takes some 100 us: those of four rows of a Llama.
_WORTH_BITS = 500_000
_SLOW_S = 0.15  # of a step's masks
_FEW = 32  # tokens: to choose among these takes a small part of the time that a whole vocabulary takes


def mask_bytes(vocab_size: int) -> int:
    """Return the bytes of a row's bits: whole words, with at least a bit more than there are tokens."""
    return _WORD_BYTES * (vocab_size // (8 * _WORD_BYTES) + 1)


@cache
def _executor() -> LLExecutor:
    """Make the library's threads, which all engines of this process share."""
    from llguidance import LLExecutor

    os.environ.setdefault("RUST_MIN_STACK", str(LARGE_STACK_BYTES))  # of threads that Rust starts
    return LLExecutor()


class RowMasks:
    """Follows some rows, and computes which tokens may follow in each.

    Args:
        rows: each has a grammar.
        vocab_size: of the model.
        bits: memory for those of the rows, of any content.

    Attributes:
        bits: see ``compute``.
    """

    def __init__(self, rows: Sequence[GuidedRow], vocab_size: int, bits: Bits) -> None:
        # The bit after those of the tokens says that the text may be complete.
        self._rows, self._complete = rows, vocab_size & 7
        # A thread takes rows that are next to each other; those of one lexer would wait for each other in two threads.
        self._order = sorted(range(len(rows)), key=lambda at: id(rows[at].lexer))
        self._grammars = list({row.grammar: row for row in rows})
        lexers, width = {id(row.lexer) for row in rows}, mask_bytes(vocab_size)
        self.bits, self._width, self._tokens = bits, width, (1 << vocab_size) - 1
        # Few bytes are read and set sooner without numpy.
        self._address, self._held = bits.ctypes.data, bits.data.cast("B") if len(rows) else memoryview(b"")
        self._is_threaded = len(lexers) > 1 and len(rows) * vocab_size >= _WORTH_BITS
        # Of each row: the byte of that bit, and the byte and bit of each of its end tokens.
        self._ends = [
            (at * width + (vocab_size >> 3), [(at * width + (end >> 3), 1 << (end & 7)) for end in row.end_ids])
            for at, row in enumerate(rows)
        ]

    def follow(self, tokens: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Follow each row's tokens; the last of them, which its sequence does not have yet, apart.

        Raises:
            EngineError: the library has failed.
        """
        new = [row.follow(*own) for row, own in zip(self._rows, tokens, strict=True)]
        consumed = [(self._rows[at], token) for at in self._order if (token := new[at]) is not None]
        with _library():
            if self._is_threaded and consumed:
                _executor().consume_token_par([(row.matcher, token) for row, token in consumed])
            else:
                for row, token in consumed:
                    row.consume(token)

    def take(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Follow one more token of some rows: their numbers, and a token each.

        Raises:
            EngineError: the library has failed.
        """
        with _library():
            for row, token in tokens:
                self._rows[row].take(token)

    def resolve_without_mask(self, tokens: Sequence[int]) -> list[int | None]:
        """Return the token of each row whose argmax over all tokens leaves no doubt about the one over its mask.

        That is a token that the grammar forces, or the argmax if the grammar allows it. Either is found in a small part
        of the time that a mask takes. Such a row follows its token at once: it is the row's next one.

        Args:
            tokens: the argmax of each row; a negative one stays.

        Returns:
            None where the mask is needed.

        Raises:
            EngineError: the library has failed.
        """
        with _library():
            settled = [row.resolve_without_mask(token) for row, token in zip(self._rows, tokens, strict=True)]
        self._look_at_time()
        return settled

    def compute(self, rows: Container[int] | None = None) -> None:
        """Set the bits of the tokens that may follow each row's: every token, once a row has ended.

        Args:
            rows: whose bits are set; None: all rows'.

        Raises:
            EngineError: the library has failed.
        """
        order = self._order if rows is None else [at for at in self._order if at in rows]
        live = [at for at in order if not self._rows[at].has_ended]
        with _library():
            if self._is_threaded and live:
                begun_s = time.perf_counter()
                matchers = [(self._rows[at].matcher, at) for at in live]
                _executor().unsafe_compute_mask_ptr(matchers, self._address, self._width, len(self._rows))
                seconds = time.perf_counter() - begun_s
                for at in live:
                    self._rows[at].grammar.note(seconds / len(live))
                self._is_threaded = seconds < _SLOW_S  # threads do not tell which row is slow: this one does
            else:
                for at in live:
                    self._rows[at].compute(self._address + at * self._width, self._width)
        for at in order:
            self._rows[at].check()
        self._look_at_time()
        if len(live) < len(order):
            self.bits[[at for at in order if self._rows[at].has_ended]] = 0xFF
        self._set_ends(order)

    def _look_at_time(self) -> None:
        """End the rows of grammars whose rows take too long together."""
        if late := [grammar for grammar in self._grammars if not grammar.has_time()]:
            for row in self._rows:
                row.problem = row.problem or (TOO_SLOW if row.grammar in late else "")

    def find_few(self, row: int) -> list[int]:
        """Return the tokens that may follow a row's, ascending, as ``compute`` found them; none if they are many."""
        left = int.from_bytes(self._held[row * self._width : (row + 1) * self._width], "little") & self._tokens
        if left.bit_count() > _FEW:
            return []
        found = list[int]()
        while left:
            found.append(left.bit_length() - 1)
            left ^= 1 << found[-1]
        return found[::-1]

    def _set_ends(self, rows: Iterable[int]) -> None:
        """Allow the tokens that end a row where its text may be complete, and nowhere else."""
        held = self._held
        for row in rows:
            complete, ends = self._ends[row]
            is_complete = held[complete] >> self._complete & 1
            for at, end in ends:
                held[at] = held[at] | end if is_complete else held[at] & ~end


def count_allowed(row: GuidedRow, tokens: Sequence[int], draft: Sequence[int]) -> int:
    """Return how many tokens of a draft a row's grammar allows, one after the other, after the tokens that it has.

    Raises:
        EngineError: the library has failed.
    """
    with _library():
        if (last := row.follow(tokens, ())) is not None:
            row.consume(last)
        return 0 if row.has_ended or row.problem else int(row.matcher.validate_tokens(list(draft)))


@contextmanager
def _library() -> Iterator[None]:
    """Turn a failure inside the library, which is no Exception, into an EngineError."""
    try:
        yield
    except BaseException as error:
        _log.error("llguidance has failed: %s", str(error)[:400])
        raise EngineError("following the grammar has failed") from None
