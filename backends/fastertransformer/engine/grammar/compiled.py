"""The compiled grammars of a model. A text that was not compiled before is tried first, in a process of its own."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EngineError, UnavailableError
from ..request.guides import Guide
from .guided_row import Grammar, most_lexers
from .library import GrammarError, compile_written, large_stacks, load_tokenizer, require_library
from .trials import LATER, Trials
from .vocabulary import find_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_KEPT = 64  # compiled grammars
_MOST_LEXERS_KEPT = 128  # of all of them
_MOST_BYTES_KEPT, _MOST_BYTES_USED = 1 << 30, 2 << 30  # of all, and of those that rows follow
_MOST_BYTES_OF_LEXERS = 256 << 20  # of one grammar
_MOST_REFUSED = 256  # that are remembered


class Grammars:
    """The compiled grammars of a model; any thread may call its methods.

    Args:
        directory: of the shards, with the tokenizer's files.
        vocab_size: of the model.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._directory, self._vocab_size = directory, vocab_size
        self._lock, self._loading, self._compiling = threading.Lock(), threading.Lock(), threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._unreadable: EngineError | None = None
        self._trials = Trials(directory, vocab_size)
        self._kept: OrderedDict[Guide, Grammar] = OrderedDict()  # the one used last is the last
        self._refused: OrderedDict[Guide, GrammarError] = OrderedDict()
        self._tried: dict[Guide, threading.Event] = {}  # which other threads wait for

    def prepare(self) -> None:
        """Start the trials and read the vocabulary: a second with 128,000 tokens, for which Python's lock is held.

        Raises:
            RequestError: there is no vocabulary, or the library is not installed.
            EngineError: the vocabulary cannot be read, or see Trials.start.
        """
        require_library()
        find_vocabulary(self._directory)
        self._trials.start()
        self._load()

    def _load(self) -> LLTokenizer:
        with self._loading:
            if self._unreadable:
                raise self._unreadable.with_traceback(None)
            try:
                self._tokenizer = self._tokenizer or load_tokenizer(self._directory, self._vocab_size)
            except EngineError as error:
                self._unreadable = error
                raise
            return self._tokenizer

    def close(self) -> None:
        """End the trials, whose requests fail."""
        self._trials.close()

    def find_rows(self, guides: Sequence[Guide | None]) -> tuple[Grammar | None, ...] | None:
        """Return the grammars of a request's rows, if nothing is to be compiled for them; see compile_rows.

        Raises:
            GrammarError: one of them was refused before.
        """
        with self._lock:
            for guide in filter(None, guides):
                if refused := self._refused.get(guide):
                    raise refused.with_traceback(None)
            if any(guide and guide not in self._kept for guide in guides):
                return None
            found = tuple(self._kept[guide] if guide else None for guide in guides)
            for guide in filter(None, guides):
                self._kept.move_to_end(guide)
            self._drop_oldest()
        expected = list[tuple[Grammar, int]]()
        for grammar, rows in Counter(filter(None, found)).items():
            if not grammar.expect(rows, may_compile=False):
                for each, count in expected:
                    each.forget(count)
                return None
            expected.append((grammar, rows))
        return found

    def compile_rows(
        self, guides: Sequence[Guide | None], is_wanted: Callable[[], bool] = lambda: True, wait_s: float = 60.0
    ) -> tuple[Grammar | None, ...]:
        """Compile the grammars of a request's rows, with lexers for all of them; see Grammar.expect.

        Args:
            guides: of the rows.
            is_wanted: returns whether the client still waits.
            wait_s: for the trials.

        Raises:
            GrammarError: llguidance is not installed, there is no vocabulary, or the grammar is invalid or too large.
            UnavailableError: there is no time or memory for it now.
            GoneError: the client has gone.
            EngineError: the process of the trials has failed.
        """
        until_s = time.monotonic() + wait_s
        found = tuple(self.compile(guide, is_wanted, until_s) if guide else None for guide in guides)
        for grammar, rows in Counter(filter(None, found)).items():
            grammar.expect(rows)
        with self._lock:
            self._drop_oldest()
        return found

    def compile(
        self, guide: Guide, is_wanted: Callable[[], bool] = lambda: True, until_s: float | None = None
    ) -> Grammar:
        """Compile a grammar, or give the one that was compiled before; see compile_rows."""
        until_s = time.monotonic() + 60.0 if until_s is None else until_s
        while True:
            with self._lock:
                if found := self._kept.get(guide):
                    self._kept.move_to_end(guide)
                    return found
                if refused := self._refused.get(guide):
                    raise refused.with_traceback(None)
                other = self._tried.get(guide)
                mine = self._tried.setdefault(guide, threading.Event())
            if other:
                self._trials.wait_for(other, is_wanted, until_s)
                continue
            try:
                return self._try(guide, is_wanted, until_s)
            finally:
                with self._lock:
                    del self._tried[guide]
                mine.set()

    def _try(self, guide: Guide, is_wanted: Callable[[], bool], until_s: float) -> Grammar:
        self._load()
        try:
            tried = self._trials.run(guide, is_wanted, until_s)
        except GrammarError as error:
            with self._lock:
                self._refused[guide] = error
                while len(self._refused) > _MOST_REFUSED:
                    self._refused.popitem(last=False)
            raise
        with self._lock:
            used = sum(grammar.size_bytes for grammar in self._kept.values() if grammar.is_used)
        if used + tried.size_bytes > _MOST_BYTES_USED:
            raise UnavailableError("the grammars of other requests take all memory that there is for them", LATER)
        compile_again = partial(self._compile, guide, tried.written)
        limit = min(most_lexers(tried.seconds), 1 + _MOST_BYTES_OF_LEXERS // max(1, tried.size_bytes))
        grammar = Grammar(compile_again(), self._vocab_size, compile_again, limit, tried.seconds, tried.size_bytes)
        with self._lock:
            self._kept[guide] = grammar
            self._drop_oldest()
        return grammar

    def _compile(self, guide: Guide, written: str) -> LLMatcher:
        """Compile what was tried, on a thread whose stack is far larger than the trial's."""
        tokenizer, found = self._load(), Future["LLMatcher"]()

        def call() -> None:
            try:
                found.set_result(compile_written(guide.kind, written, tokenizer))
            except BaseException as error:  # a failure inside the library is no Exception
                found.set_exception(error)

        with self._compiling:  # one at a time: the engine needs the other cores
            with large_stacks():
                threading.Thread(target=call, name="grammar", daemon=True).start()
            return found.result()

    def _drop_oldest(self) -> None:
        """Drop grammars without rows that were not used for longest, while too many are kept."""
        lexers = sum(grammar.lexers for grammar in self._kept.values())
        held_bytes = sum(grammar.held_bytes for grammar in self._kept.values())
        for guide, grammar in list(self._kept.items())[:-1]:
            if len(self._kept) <= _MOST_KEPT and lexers <= _MOST_LEXERS_KEPT and held_bytes <= _MOST_BYTES_KEPT:
                break
            if not grammar.is_used:  # else its memory would stay, and be needed once more when it is compiled again
                del self._kept[guide]
                lexers -= grammar.lexers
                held_bytes -= grammar.held_bytes
