"""Grammars as llguidance takes them, compiled within its limits, and what it says of them in words of our own.

The package is an optional dependency, imported when it is needed. Two processes run it: a trial (see trial.py), and the
one that generates, where threads that run it get large stacks: the library calls itself for each reference of a
reference.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EngineError, RequestError
from .json_schema import without_neutral
from .vocabulary import find_vocabulary, read_token_bytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

LARGE_STACK_BYTES = 64 << 20  # of addresses; a trial has a sixteenth of it
# What any JSON may have between its tokens; a model that is unsure would go on with white space for ever.
_WHITE_SPACE: Any = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}
# About 1 to 2 kB each, made while a grammar is used; the library's own limit is five times as many.
MOST_STATES = 50_000
_MOST_ITEMS = 6_000  # that may follow at a time: as many alternatives; the library's own limit is 2,000
# GBNF writes ::= after a rule's name. Lark writes a colon, with modifiers before the name or options after it.
_LARK = re.compile(r"^\s*(%llguidance\b|[?!]*start\s*(\.-?\d+)?\s*(\[[^\]\n]*\]|\{[^}\n]*\})?\s*:(?!:=))", re.M)
_LARK_RULE = re.compile(r"^\s*[?!]*_?[A-Za-z]\w*\s*(\.-?\d+)?\s*:", re.M)
_MODIFIERS = re.compile(r"^(\s*)\?!(?=_?[a-z])", re.M)  # which the library knows in the other order
# In GBNF a rule may have the name that Lark's first rule has. Texts, sets of characters and comments stay.
_START = re.compile(r"""("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*)|(?<![-\w])start(?![-\w])""")
_STARTING = threading.Lock()
# How the library's words begin where it has reached a limit, and what a client reads in their place.
_LIMITS = (
    (r"panic", "it is larger than can be compiled"),
    (r".*too many states", "its expressions have too many states"),
    (r".*too many expressions|.*\bfuel\b|LexerTooComplex", "its expressions grow too large"),
    (r".*Current row has \d+ items|.*\bitems\b.*\b(limit|exceeded)|ParserTooComplex", "too much may follow at a time"),
    (r".*recursion (limit|depth) exceeded", "it is nested more deeply than the recursion limit allows"),
)


class Vocabulary:
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


class GrammarError(RequestError):
    """A grammar cannot be honoured.

    Args:
        kind: of the guide.
        reason: why.
        is_ours: whether the reason is worded here, and not by the library, which quotes the grammar.

    Attributes:
        reason: see Args.
        is_ours: see Args.
        logged: what a log may say: nothing of the grammar's text.
    """

    def __init__(self, kind: str, reason: str, is_ours: bool) -> None:
        beginning = f"guided_decoding_guide of type {kind} cannot be honoured"
        super().__init__(f"{beginning}: {reason}", "docs/tensors.md says what each type takes")
        self.reason, self.is_ours = reason, is_ours
        self.logged = f"{beginning}: {reason}" if is_ours else beginning


def require_library() -> None:
    """Import llguidance.

    Raises:
        RequestError: it is not installed.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError:
        raise RequestError(
            "guided_decoding_guide_type: a grammar needs the package llguidance, which the server's Python lacks",
            "install it there: pip install 'slipway[structured]', or pip install llguidance",
        ) from None


def load_tokenizer(directory: Path, vocab_size: int) -> LLTokenizer:
    """Read the vocabulary beside the shards, which takes a second with 128,000 tokens and holds Python's lock.

    Raises:
        RequestError: there is no vocabulary, or the library is not installed.
        EngineError: the vocabulary cannot be read.
    """
    require_library()
    from llguidance import LLTokenizer

    name = find_vocabulary(directory).name
    try:
        vocabulary = Vocabulary(read_token_bytes(directory, vocab_size))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise EngineError(f"the model's {name} cannot be read: {type(error).__name__}") from error
    wrapper: Any = vocabulary
    vocabulary.tokenizer = LLTokenizer(wrapper, vocab_size + 1, eos_token=vocab_size)
    return vocabulary.tokenizer


def compile_written(kind: str, written: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile what ``write`` has returned; Python's lock is free meanwhile.

    Raises:
        GrammarError: the grammar is invalid, allows no text, or exceeds a limit of the library.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=MOST_STATES, max_items_in_row=_MOST_ITEMS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, written, log_level=0, limits=limits)
    beginning = matcher.deep_copy()
    beginning.compute_bitmask()  # some grammars turn out here to allow nothing
    if beginning.is_error():
        raise refused(kind, beginning.get_error())
    return matcher


def refused(kind: str, problem: str) -> GrammarError:
    """Word what the library says of a grammar: its jargon in our words; what names a place of the grammar stays."""
    words = " ".join(problem.replace("<non-verbose/>", "").split())
    ours = "no text satisfies it" if words.startswith("NoExtension") else limit_of(words)
    return GrammarError(kind, ours or words[:400], is_ours=bool(ours))


def limit_of(words: str) -> str:
    """Return which limit the library has reached by its words; empty: none."""
    return next((meaning for pattern, meaning in _LIMITS if re.match(pattern, words, re.S)), "")


def write(kind: str, text: str) -> str:
    """Write a guide in the library's own form.

    Raises:
        GrammarError: it cannot be read.
    """
    try:
        return _write(kind, text)
    except (ValueError, RecursionError) as error:
        raise refused(kind, str(error)) from None


def _write(kind: str, text: str) -> str:
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if kind in ("json", "json_schema"):
        schema = "{}" if kind == "json" else without_neutral(text)
        return LLMatcher.grammar_from_json_schema(schema, defaults=_WHITE_SPACE)
    if kind == "regex":
        # \d is 0 to 9: the digits of all scripts are hardly ever meant.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(_without_anchors(text), 'd')}/")
    if kind == "choice":
        return LLMatcher.grammar_from_lark(_one_of(text))
    if _LARK.search(text) or ("::=" not in text and _LARK_RULE.search(text)):
        return LLMatcher.grammar_from_lark(_MODIFIERS.sub(r"\1!?", text))
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(_START.sub(lambda found: found[1] or "start-of-root", text)))
    except Exception as error:  # of no class of its own
        raise ValueError(str(error)) from None


def _one_of(text: str) -> str:
    """Write a JSON list of texts as one expression: the library follows few alternatives of a rule at a time."""
    choices = json.loads(text)
    if not (isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices)):
        raise ValueError("it must be a JSON list of texts, at least one")
    some = "|".join(_literal(each) for each in dict.fromkeys(choices) if each)
    alternatives = ['""'] * ("" in choices) + [f"/{some}/"] * bool(some)
    return f"start: {' | '.join(alternatives)}"


def _literal(text: str) -> str:
    """Write a text as a regular expression."""
    return re.sub(r"[\x00-/:-@\[-`{-\x7f]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def _without_anchors(regex: str) -> str:
    """Leave out ``^`` and ``$`` around an expression: it matches the whole output anyway; the library lacks them."""
    regex = regex.removeprefix("^")
    is_end = regex.endswith("$") and (len(regex[:-1]) - len(regex[:-1].rstrip("\\"))) % 2 == 0
    return regex[:-1] if is_end else regex


@contextmanager
def large_stacks() -> Iterator[None]:
    """Return the threads that are started meanwhile the stack that the library may need."""
    with _STARTING:
        before = threading.stack_size(LARGE_STACK_BYTES)
        try:
            yield
        finally:
            threading.stack_size(before)
