"""Grammars compiled by llguidance, an optional dependency that is imported when the first request has a grammar."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..request.guides import TYPE, Guide
from .guided_row import Grammar, most_lexers
from .vocabulary import read_token_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_MOST_KEPT = 64  # compiled grammars
_MOST_LEXERS_KEPT = 128  # of all of them
# What any JSON may have between its tokens; a model that is unsure would go on with white space for ever.
_WHITE_SPACE: Any = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}
# About 1 to 2 kB each, made while a grammar is used; the library's own limit is five times as many.
_MOST_STATES = 50_000


class _Vocabulary:
    """A vocabulary as llguidance reads it, with one token more, which says that a text is complete.

    Attributes:
        tokenizer: that llguidance made of it; None: not yet.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = [*tokens, b"\xff<complete>"]
        self.eos_token_id = len(tokens)
        self.tokenizer: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text that a grammar forces; it is then generated in these tokens, the longest that fit."""
        return self.tokenizer.greedy_tokenize(text) if self.tokenizer else []


class Grammars:
    """The compiled grammars of a model; any thread may call its methods.

    Args:
        directory: of the shards, with the tokenizer's files.
        vocab_size: of the model.
    """

    def __init__(self, directory: Path, vocab_size: int) -> None:
        self._directory, self._vocab_size = directory, vocab_size
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Guide, Grammar] = OrderedDict()  # the one used last is the last

    def prepare(self) -> None:
        """Read the vocabulary, which takes a second with 128,000 tokens, in which no other Python thread runs.

        Raises:
            RequestError: see compile, which raises it again.
        """
        with self._lock:
            self._tokenizer = self._tokenizer or self._load()

    def compile(self, guide: Guide) -> Grammar:
        """Compile a grammar, which takes up to some 100 ms, or give the one that was compiled before.

        Raises:
            RequestError: llguidance is not installed, there is no vocabulary, or the grammar is invalid or too large.
        """
        with self._lock:
            if found := self._kept.get(guide):
                self._kept.move_to_end(guide)
                return found
            tokenizer = self._tokenizer = self._tokenizer or self._load()
        begun_s = time.perf_counter()
        matcher = _compile(guide, tokenizer)
        limit = most_lexers(time.perf_counter() - begun_s)
        grammar = Grammar(matcher, self._vocab_size, partial(_compile, guide, tokenizer), limit)
        with self._lock:
            self._kept[guide] = grammar
            self._drop_oldest()
        return grammar

    def compile_rows(self, guides: Sequence[Guide | None]) -> tuple[Grammar | None, ...]:
        """Compile the grammars of a request's rows, with lexers for all of them; see Grammar.expect.

        Raises:
            RequestError: see compile.
        """
        found = tuple(self.compile(guide) if guide else None for guide in guides)
        for grammar, rows in Counter(filter(None, found)).items():
            grammar.expect(rows)
        with self._lock:
            self._drop_oldest()
        return found

    def _drop_oldest(self) -> None:
        """Drop grammars without rows that were not used for longest, while too many are kept."""
        lexers = sum(grammar.lexers for grammar in self._kept.values())
        for guide, grammar in list(self._kept.items())[:-1]:
            if len(self._kept) <= _MOST_KEPT and lexers <= _MOST_LEXERS_KEPT:
                break
            if not grammar.is_used:  # else its memory would stay, and be needed once more when it is compiled again
                del self._kept[guide]
                lexers -= grammar.lexers

    def _load(self) -> LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError(
                f"{TYPE}: a grammar needs the package llguidance, which the server's Python does not have",
                "install it there: pip install 'slipway[structured]', or pip install llguidance",
            ) from None
        vocabulary = _Vocabulary(read_token_bytes(self._directory, self._vocab_size))
        wrapper: Any = vocabulary
        vocabulary.tokenizer = LLTokenizer(wrapper, self._vocab_size + 1, eos_token=self._vocab_size)
        return vocabulary.tokenizer


def _compile(guide: Guide, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
    try:
        matcher = LLMatcher(tokenizer, _grammar(guide), log_level=0, limits=limits)
        beginning = matcher.deep_copy()
        beginning.compute_bitmask()  # some grammars turn out here to allow nothing
    except (ValueError, RecursionError) as error:
        raise _refused(guide, str(error)) from None
    if beginning.is_error():
        raise _refused(guide, beginning.get_error())
    return matcher


def _refused(guide: Guide, problem: str) -> RequestError:
    words = " ".join(problem.replace("<non-verbose/>", "").split())
    if words.startswith("NoExtension"):
        words = "no text satisfies it"
    return RequestError(
        f"guided_decoding_guide of type {guide.kind} cannot be honoured: {words[:400]}",
        "docs/tensors.md says what each type takes",
    )


def _grammar(guide: Guide) -> str:
    """Write a guide in the library's own form."""
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    written: str
    if guide.kind in ("json", "json_schema"):
        schema = "{}" if guide.kind == "json" else guide.text
        written = LLMatcher.grammar_from_json_schema(schema, defaults=_WHITE_SPACE)
    elif guide.kind == "regex":
        # \d is 0 to 9: the digits of all scripts are hardly ever meant.
        written = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(_without_anchors(guide.text), 'd')}/")
    elif guide.kind == "choice":
        choices = json.loads(guide.text)
        if not (isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices)):
            raise ValueError("it must be a JSON list of texts, at least one")
        written = grammar_from("choice", guide.text)
    else:
        written = grammar_from("grammar", guide.text)  # Lark or GBNF, which it tells apart
    return written


def _without_anchors(regex: str) -> str:
    """Leave out ``^`` and ``$`` around an expression: it matches the whole output anyway; the library lacks them."""
    regex = regex.removeprefix("^")
    is_end = regex.endswith("$") and (len(regex[:-1]) - len(regex[:-1].rstrip("\\"))) % 2 == 0
    return regex[:-1] if is_end else regex
