"""Where a row is in its grammar, and which rows share a lexer.

A matcher and its copies share the states of one lexer, which llguidance makes as rows need them, behind a lock: the
masks of rows that share a lexer are computed one after the other, whatever the number of threads. A grammar that many
rows follow at a time is therefore compiled several times, and each of them begins with the lexer that the fewest use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from time import thread_time
from typing import TYPE_CHECKING

from ..errors import RequestError
from .library import limit_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_LEXERS = 64  # of a grammar
_COMPILING_S = 0.25  # that a grammar's further lexers may take
# A call that takes longer is slow, and a step of all rows of a grammar. The library limits the work of each call.
_SLOW_S, _SLOW_STEP_S = 0.03, 0.15
_MOST_SLOW_S = 0.8  # that a row's slow calls may take, or a grammar's slow steps, for which all other rows wait
TOO_SLOW = "its tokens take too long to find"
_BYTES_A_SECOND = 100 << 20  # of states that calls of the library make: (a|b)*a(a|b){30} takes 16 MB in 0.18 s
_AT_ONCE_S = 0.02  # that the engine's thread may take to compile one


def most_lexers(seconds: float) -> int:
    """Choose how many lexers a grammar may have that is compiled in some seconds; one if one core computes masks."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(_MOST_LEXERS, 1 + int(_COMPILING_S / max(seconds, 1e-6))) if cores > 2 else 1


@dataclass(eq=False)
class Lexer:
    """A lexer's states, by a matcher that is at the beginning of the grammar.

    Attributes:
        matcher: is copied, and never changed itself.
        rows: that use it.
    """

    matcher: LLMatcher
    rows: int = 0


class Grammar:
    """A compiled grammar; any thread may call its methods.

    Args:
        matcher: at its beginning.
        vocab_size: of the model.
        compile_again: makes another matcher like it, with a lexer of its own.
        most_lexers: that it may have.
        compiling_s: that ``compile_again`` takes.
        lexer_bytes: of memory that each lexer takes at first.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        compile_again: Callable[[], LLMatcher],
        most_lexers: int,
        compiling_s: float = 0.0,
        lexer_bytes: int = 0,
    ) -> None:
        self.vocab_size = vocab_size
        self._compile_again, self._most_lexers = compile_again, most_lexers
        self._compiling_s, self._lexer_bytes = compiling_s, lexer_bytes
        self._lock, self._growing = threading.Lock(), threading.Lock()  # no row waits for the second one
        self._lexers, self._expected = [Lexer(matcher)], 0
        self._step_s = self._slow_s = self._busy_s = 0.0

    @property
    def lexers(self) -> int:
        """How many there are."""
        return len(self._lexers)

    @property
    def size_bytes(self) -> int:
        """Memory that they take at first."""
        return self.lexers * self._lexer_bytes

    @property
    def held_bytes(self) -> int:
        """Memory that they take by now, about: states are made as rows need them, and are most of the calls' work."""
        return self.size_bytes + int(self._busy_s * _BYTES_A_SECOND)

    @property
    def is_used(self) -> bool:
        """Whether rows are expected that have not ended."""
        return self._expected > 0

    def expect(self, rows: int, may_compile: bool = True) -> bool:
        """Compile more lexers if there are too few for these rows and those that have not ended; see ``forget``.

        Returns:
            Whether there are enough; if not, because ``may_compile`` is false, the rows are not expected.
        """
        with self._lock:
            if not may_compile and len(self._lexers) < min(self._expected + rows, self._most_lexers):
                return False
            self._expected += rows
        with self._growing:
            while len(self._lexers) < min(self._expected, self._most_lexers):
                lexer = Lexer(self._compile_again())
                with self._lock:
                    self._lexers.append(lexer)
        return True

    def forget(self, rows: int) -> None:
        """Expect some rows no longer."""
        with self._lock:
            self._expected = max(0, self._expected - rows)
            self._slow_s *= self._expected > 0

    def note(self, seconds: float) -> None:
        """Count what a call for one of its rows has taken in a step."""
        self._step_s += seconds
        self._busy_s += seconds

    def has_time(self) -> bool:
        """Count a step of all its rows; returns whether they may go on."""
        self._slow_s = (self._slow_s + self._step_s) if self._step_s > _SLOW_STEP_S else self._slow_s
        self._step_s = 0.0
        return self._slow_s < _MOST_SLOW_S

    def begin(self, end_ids: Iterable[int]) -> GuidedRow:
        """Begin a row that some tokens may end.

        Raises:
            RequestError: other rows have used the last lexer up since this one was expected, and one more takes long.
        """
        with self._lock:
            if not self._lexers:
                if self._compiling_s > _AT_ONCE_S:
                    raise RequestError("another row's output has reached a limit of this grammar", "send it again")
                self._lexers.append(Lexer(self._compile_again()))
            lexer = min(self._lexers, key=lambda each: each.rows)
            lexer.rows += 1
        return GuidedRow(self, lexer, end_ids)

    def end(self, lexer: Lexer, is_spent: bool) -> None:
        """Note that a row of a lexer has ended; one that is spent is used by no later row."""
        with self._lock:
            lexer.rows -= 1
            if is_spent and lexer in self._lexers:
                self._lexers.remove(lexer)


class GuidedRow:
    """One row and its grammar.

    Args:
        grammar: that it must follow.
        lexer: of the grammar.
        end_ids: tokens that end the row, some of which may be outside the vocabulary.

    Attributes:
        grammar: see Args.
        lexer: that it uses; None: it has ended.
        end_ids: those of them that are in the vocabulary.
        matcher: of the library, after the tokens that were consumed.
        has_ended: whether a token has ended the row, and every token may follow.
        problem: why the grammar cannot be followed any further; empty: it can.
        slow_s: of processor time that tokens have taken which took long.
    """

    def __init__(self, grammar: Grammar, lexer: Lexer, end_ids: Iterable[int]) -> None:
        self.grammar, self._beginning = grammar, lexer.matcher
        self.lexer: Lexer | None = lexer
        self.end_ids = sorted(token for token in end_ids if token < grammar.vocab_size)
        self.problem, self.slow_s, self._is_spent = "", 0.0, False
        self._begin()

    def _begin(self) -> None:
        self.matcher = self._beginning.deep_copy()
        self._followed, self.has_ended = 0, False
        self._forced, self._taken = list[int](), 0  # tokens of a text that is forced, and how many are followed

    def follow(self, tokens: Sequence[int], pending: Sequence[int]) -> int | None:
        """Follow the row's tokens, of which the last are ``pending``; fewer than before: it was begun again.

        Returns:
            The last new token, which the matcher is still to consume; None: there is none.
        """
        if len(tokens) + len(pending) < self._followed:
            self._begin()
        last, known, self._forced = None, len(tokens), []
        for token in (*tokens[self._followed :], *pending[max(0, self._followed - known) :]):
            if last is not None:
                self.consume(last)
            last = self._advance(token)
        return last

    def fork(self) -> GuidedRow:
        """Return a copy that follows tokens of its own; it leaves the lexer to this one."""
        forked = copy(self)
        forked.matcher, forked._forced = self.matcher.deep_copy(), []
        return forked

    def consume(self, token: int) -> None:
        """Have the matcher consume a token."""
        begun_s = thread_time()
        self._forced = []
        self.matcher.consume_token(token)
        self._note(thread_time() - begun_s)

    def compute(self, address: int, size_bytes: int) -> None:
        """Write the bits of the tokens that may follow."""
        begun_s = thread_time()
        self.matcher.unsafe_compute_mask_ptr(address, size_bytes)
        self._note(thread_time() - begun_s)

    def _note(self, seconds: float) -> None:
        """Count what a call of the library has taken, for which all other rows wait."""
        self.grammar.note(seconds)
        if seconds > _SLOW_S:
            self.slow_s += seconds
            if self.slow_s > _MOST_SLOW_S:
                self.problem = TOO_SLOW

    def take(self, token: int) -> None:
        """Follow the row's next token."""
        if self._advance(token) is not None:
            self.consume(token)

    def _advance(self, token: int) -> int | None:
        """Count a token; returns it if the matcher is still to consume it."""
        # A token of numbers that are not finite is negative; such a row fails anyway.
        self.has_ended = self.has_ended or token < 0 or token in self.end_ids
        self._followed += 1
        return None if self.has_ended else token

    def resolve_without_mask(self, token: int) -> int | None:
        """Return the token that follows if a mask is not needed to tell, and follow it; see RowMasks.settle.

        After an error of the matcher nothing is forced and no token is allowed.
        """
        if self.has_ended or token < 0:
            self._advance(token)
            return token
        begun_s = thread_time()
        if self._taken >= len(self._forced):
            self._forced, self._taken = self.matcher.compute_ff_tokens(), 0  # all of the text, however long it is
        if self._forced:
            token = self._forced[self._taken]
        is_next = token not in self.end_ids and bool(self.matcher.try_consume_tokens([token]))
        self._taken = self._taken + 1 if is_next and self._forced else len(self._forced)
        self._note(thread_time() - begun_s)
        if not is_next:
            return None
        self._followed += 1
        return token

    def check(self) -> None:
        """Note why the matcher has failed, if it has."""
        if self.matcher.is_error():
            self._is_spent = True
            self.problem = limit_of(self.matcher.get_error()) or "no token of the vocabulary fits"

    def end(self) -> None:
        """Leave the lexer to other rows."""
        if self.lexer:
            # A limit that the lexer has reached would fail every later row that uses it.
            self.grammar.end(self.lexer, is_spent=self._is_spent)
            self.lexer = None
