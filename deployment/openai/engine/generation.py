"""One answer: asked of the engine, cut into tokens, made text, ended where it must end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from deployment.openai.engine.asked import SequenceRequest
from deployment.openai.engine.outputs import Outputs
from deployment.openai.engine.scores import GENERATED, GIVEN, Score, read_scores
from deployment.openai.engine.triton import Triton
from deployment.openai.texts.texts import Detokenizer


class StopStrings:
    """Passes a text on up to the first stop string; no part of one is passed on.

    Args:
        words: that end the text.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words, self._held = tuple(words), ""

    def add(self, piece: str) -> tuple[str, str | None]:
        """Return what may be passed on, and the stop string that the piece has completed, if any."""
        if not self._words:
            return piece, None
        text = self._held + piece
        found = [(place, word) for word in self._words if (place := text.find(word)) >= 0]
        if found:
            # The one that is complete first, whatever pieces the text comes in; of several the longest.
            place, word = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
            self._held = ""
            return text[:place], word
        kept = max(_overlap(text, word) for word in self._words)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], None

    def rest(self) -> str:
        """Return what was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """Return how many characters at the end of a text begin a word."""
    longest = min(len(text), len(word) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(word[:count])), 0)


STOP, LENGTH = "stop", "length"


class Piece(NamedTuple):
    """What one token adds to an answer.

    Attributes:
        text: may be empty: of a token that ends the answer, or while a character or a stop string may be incomplete.
        tokens: the token; empty where the answer ends without one.
        scores: of the token, where log probabilities were asked for.
        prompt_scores: in the first piece: of the prompt's tokens but the first, where they were asked for.
        finish_reason: of the last piece: "stop" or "length".
        stop_reason: the stop string, or the token among ``stop_token_ids``, that ended the answer, if one did.
    """

    text: str
    tokens: tuple[int, ...] = ()
    scores: tuple[Score, ...] = ()
    prompt_scores: Sequence[Score] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Sink(Protocol):
    """Takes the pieces of one answer."""

    def get_ready(self) -> None:
        """Do what can be done before the first piece; may be called again."""

    def put(self, pieces: Sequence[Piece]) -> bool:
        """Take what the engine sent together; returns whether the client is far behind."""

    async def catch_up(self) -> None:
        """Wait until the client is no more behind."""


async def generate(triton: Triton, request: SequenceRequest, sink: Sink) -> None:
    """Generate an answer, a piece a token.

    The engine stops when this is cancelled, and behind a stop string.

    Raises:
        ApiError: the server refused the request, failed on it, or is gone.
    """
    writer = _Writer(request, sink)
    await triton.ask(request, writer)
    writer.end()
    await sink.catch_up()


class _Writer:
    """Makes pieces of the engine's answers, each of which holds all tokens so far."""

    def __init__(self, request: SequenceRequest, sink: Sink) -> None:
        self._request, self._sink = request, sink
        self._shown = request.shown
        self._stops = StopStrings(request.stops)
        self._prompt_scores: Sequence[Score] = ()
        self._last: Outputs | None = None
        self._count, self._is_finished = 0, False
        self.has_enough = False

    def get_ready(self) -> None:
        """Do what can be done before the first answer."""
        self._detokenizer = Detokenizer(self._request.model.texts, self._request.prompt[: self._shown])
        self._sink.get_ready()

    def take(self, answer: Outputs) -> bool:
        """Read an answer; returns whether the client is far behind. Of a search only the last answer counts."""
        if self._request.is_searched:
            self._last = answer
            return False
        return self._write(answer)

    async def catch_up(self) -> None:
        """Wait until the client is no more behind."""
        await self._sink.catch_up()

    def end(self) -> None:
        """Write what is left once there are no more answers."""
        if self._last is not None:
            self._write(self._last)
        if not self._is_finished:
            reason = LENGTH if self._count >= self._request.max_tokens else STOP
            self._sink.put([Piece(self._stops.rest(), prompt_scores=self._prompt_scores, finish_reason=reason)])

    def _write(self, answer: Outputs) -> bool:
        """Make a piece of each token that the answer before did not have."""
        first = self._count
        tokens = answer.new_tokens(self._shown + first, self._shown + self._request.max_tokens)
        scores = read_scores(answer, GENERATED, first, first + len(tokens))[:]
        if first == 0:
            self._prompt_scores = read_scores(answer, GIVEN, 1, len(self._request.prompt))
        pieces = list[Piece]()
        for index, token in enumerate(tokens):
            if not self._is_finished:
                pieces.append(self._piece(token, tuple(scores[index : index + 1])))
        if not pieces:
            return False
        self.has_enough = pieces[-1].stop_reason in self._request.stops
        return self._sink.put(pieces)

    def _piece(self, token: int, scores: tuple[Score, ...]) -> Piece:
        request = self._request
        self._count += 1
        is_end = token in request.end_ids or token in request.stop_ids
        text, stop = ("", None) if is_end else self._text(token)
        self._is_finished = is_end or stop is not None or self._count >= request.max_tokens
        if not self._is_finished:
            return Piece(text, (token,), scores, self._take_prompt_scores())
        text += "" if stop is not None else self._stops.rest()
        reason = token if token in request.stop_ids else stop
        finish = STOP if is_end or stop is not None else LENGTH
        return Piece(text, (token,), scores, self._take_prompt_scores(), finish, reason)

    def _take_prompt_scores(self) -> Sequence[Score]:
        taken, self._prompt_scores = self._prompt_scores, ()
        return taken

    def _text(self, token: int) -> tuple[str, str | None]:
        added = self._detokenizer.add(token)
        return (added, None) if self._count <= self._request.min_tokens else self._stops.add(added)
