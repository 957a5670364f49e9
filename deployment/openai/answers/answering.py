"""Ask for all answers of a request side by side, and give them whole or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from deployment.openai.answers.event_stream import EventStream
from deployment.openai.answers.shares import Share
from deployment.openai.answers.writing import write_choice
from deployment.openai.engine.asked import SequenceRequest
from deployment.openai.engine.generation import Piece, Sink, generate
from deployment.openai.engine.scores import Score
from deployment.openai.errors import ApiError
from deployment.openai.service import Service
from deployment.openai.turns import Turns

_ANY_TEXT = "\ue000"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_SPACED = json.JSONEncoder()
CUT = ApiError("the endpoint ends, and this answer with it", "send the request again", status=503)
"""Why an answer that has begun is not complete."""


@dataclass
class Answer:
    """An answer as far as it has come.

    Attributes:
        texts: of the pieces, without what ended the answer.
        tokens: with the token that ended it, if one did.
        scores: of the tokens, where log probabilities were asked for.
        prompt_scores: of the prompt's tokens but the first, where they were asked for.
        finish_reason, stop_reason: as in ``Piece``.
    """

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    prompt_scores: Sequence[Score] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.texts.append(piece.text)
        self.tokens += piece.tokens
        self.scores += piece.scores
        self.prompt_scores = self.prompt_scores or piece.prompt_scores
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    def get_ready(self) -> None:
        """Do nothing."""

    def put(self, pieces: Sequence[Piece]) -> bool:
        """Append pieces; they are sent when the answer is complete."""
        for piece in pieces:
            self.add(piece)
        return False

    async def catch_up(self) -> None:
        """Do nothing."""


class Form(Protocol):
    """How the answers of an endpoint are written."""

    @property
    def kind(self) -> str:
        """Name of the whole answer's object."""

    @property
    def chunk_kind(self) -> str:
        """Name of a stream's objects."""

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Write a whole answer, but for its log probabilities."""

    def logprobs(self, index: int, answer: Answer) -> Iterator[dict[str, list[Any]]]:
        """Write its log probabilities, if they were asked for, batch by batch."""

    def beginning(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """Write what a stream's answer begins with, before its first token; None: nothing."""

    @property
    def begins_with_scores(self) -> bool:
        """Whether that has log probabilities."""

    def beginning_logprobs(self, index: int, answer: Answer) -> Iterator[dict[str, list[Any]]]:
        """Write them, batch by batch."""

    @property
    def is_text_alone(self) -> bool:
        """Whether the parts of an answer that goes on differ by their texts alone."""

    def part(self, index: int, so_far: Answer, piece: Piece) -> dict[str, Any]:
        """Write what a token adds; ``so_far`` has the piece already."""


@dataclass(frozen=True)
class Plan:
    """A request that is ready to be answered.

    Attributes:
        head: id, time and model of every object of the answer.
        requests: for the answers to each prompt, all those of the first prompt first.
        drawn: answers that are generated for a prompt.
        given: answers of them that the client gets.
        prompt_tokens: of all prompts.
        form: how answers are written.
        wants_usage: whether a stream ends with the usage.
    """

    head: dict[str, Any]
    requests: Sequence[SequenceRequest]
    drawn: int
    given: int
    prompt_tokens: int
    form: Form
    wants_usage: bool = False

    def usage(self, answers: Sequence[Answer]) -> dict[str, int]:
        """Count the tokens of the request and of what was generated."""
        return self.usage_of(sum(len(answer.tokens) for answer in answers))

    def usage_of(self, made: int) -> dict[str, int]:
        """Count the tokens of the request, and those that were generated."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
        }


async def answer_whole(service: Service, plan: Plan) -> tuple[bytes, dict[str, int]]:
    """Return the answer to a request once it is complete, and the usage.

    Raises:
        ApiError: the server failed on a part of it; the other parts are cancelled.
    """
    answers = [Answer() for _ in plan.requests]
    await _generate_all(service, plan.requests, answers)
    usage = plan.usage(answers)
    return await service.turns.run(_write_whole(plan, answers, usage)), usage


def _write_whole(plan: Plan, answers: list[Answer], usage: dict[str, int]) -> Generator[None, None, bytes]:
    """Write an answer, which may take seconds where it has many log probabilities."""
    kept: list[Answer] = []
    for first in range(0, len(answers), plan.drawn):
        kept += _best(answers[first : first + plan.drawn], plan.given)
    choices: list[str] = []
    for index, answer in enumerate(kept):
        choice, logprobs = plan.form.choice(index, answer), plan.form.logprobs(index, answer)
        choices.append((yield from write_choice(choice, logprobs, _SPACED)))
    before = _SPACED.encode({**plan.head, "object": plan.form.kind})[:-1]
    return "".join((before, ', "choices": [', ", ".join(choices), f'], "usage": {_SPACED.encode(usage)}}}')).encode()


def _best(answers: list[Answer], count: int) -> list[Answer]:
    """Keep the answers whose tokens are most probable on average."""
    if count == len(answers):
        return answers
    return sorted(answers, key=_mean_log_prob, reverse=True)[:count]


def _mean_log_prob(answer: Answer) -> float:
    return sum(score.log_prob for score in answer.scores) / max(1, len(answer.scores))


async def answer_stream(
    request: web.Request, service: Service, plan: Plan
) -> tuple[web.StreamResponse, dict[str, int]]:
    """Send the answer to a request as events, one a token; the stream begins when the first token is there.

    Returns:
        The response, which is complete, and the usage.

    Raises:
        ApiError: the server refused the request, so that no stream has begun. Later failures are an event.
    """
    stream = EventStream(request)
    answers = [_StreamedAnswer(plan, index, stream, service.turns) for index in range(len(plan.requests))]
    try:
        await _generate_all(service, plan.requests, answers)
    except ApiError as error:
        if not stream.has_begun:
            raise
        stream.send(_event(_JSON.encode(error.body)))
    except asyncio.CancelledError:  # the endpoint ends, unless it is the client who has gone
        if stream.has_begun:
            with contextlib.suppress(ConnectionError):
                stream.cut(_event(_JSON.encode(CUT.body)))
        raise
    usage = plan.usage([each.answer for each in answers])
    await stream.write_eof((answers[0].write_usage(usage) if plan.wants_usage else b"") + _event("[DONE]"))
    return stream, usage


class _StreamedAnswer:
    """Sends the events of one answer; what all of them have is encoded once, of most all but the text.

    Args:
        plan: of the request.
        index: of the answer.
        stream: that the events go to.
        turns: for the log probabilities of a long prompt.
    """

    def __init__(self, plan: Plan, index: int, stream: EventStream, turns: Turns) -> None:
        self._plan, self._form, self._index, self._stream = plan, plan.form, index, stream
        self._turns = turns
        self._has_begun, self._waiting = not plan.form.begins_with_scores, list[Piece]()
        self._is_alone = len(plan.requests) == 1  # so that the stream ends with this answer
        self.answer = Answer()

    def get_ready(self) -> None:
        """Write what stands around the choices of every event, and around the text where that alone is new."""
        plan = self._plan
        self._stream.get_ready()
        self._before = _JSON.encode({**plan.head, "object": plan.form.chunk_kind})[:-1] + ',"choices":['
        self._after = '],"usage":null}' if plan.wants_usage else "]}"
        if self._form.is_text_alone:
            event = self._of_choice(self._form.part(self._index, Answer(), Piece(_ANY_TEXT)))
            self._before_text, _, self._after_text = event.rpartition(f'"{_ANY_TEXT}"'.encode())

    def put(self, pieces: Sequence[Piece]) -> bool:
        """Add pieces and send an event for each; returns whether the client is far behind."""
        if not self._has_begun:
            self._waiting += pieces
            return True
        events = list[bytes]()
        for piece in pieces:
            is_first = not self.answer.tokens
            self.answer.add(piece)
            if is_first and not self._form.begins_with_scores:
                beginning = self._form.beginning(self._index, self.answer)
                events += [] if beginning is None else [self._of_choice(beginning)]
            if self._form.is_text_alone and piece.finish_reason is None:
                events += self._before_text, _JSON.encode(piece.text).encode(), self._after_text
            else:
                events.append(self._of_choice(self._form.part(self._index, self.answer, piece)))
        if self._is_alone and pieces[-1].finish_reason is not None:
            self._stream.hold(b"".join(events))
            return False
        return self._stream.send(b"".join(events))

    async def catch_up(self) -> None:
        """Wait until the client is no more behind; what begins with long log probabilities begins here."""
        if self._waiting:
            first = Answer()
            first.add(self._waiting[0])
            choice = self._form.beginning(self._index, first) or {}
            scores = self._form.beginning_logprobs(self._index, first)
            written = await self._turns.run(write_choice(choice, scores, _JSON))
            self._stream.send(_event(self._before + written + self._after))
            pieces, self._waiting, self._has_begun = self._waiting, [], True
            self.put(pieces)
        await self._stream.catch_up()

    def write_usage(self, usage: dict[str, int]) -> bytes:
        """Write the event that a stream ends with where the usage is asked for."""
        return _event(f'{self._before}],"usage":{_JSON.encode(usage)}}}')

    def _of_choice(self, choice: dict[str, Any]) -> bytes:
        return _event(self._before + _JSON.encode(choice) + self._after)


def _event(content: str) -> bytes:
    return f"data: {content}\n\n".encode()


async def _generate_all(service: Service, requests: Sequence[SequenceRequest], sinks: Sequence[Sink]) -> None:
    """Generate all answers side by side, as many at a time as others leave room for; the first failure ends all."""
    if len(requests) == 1:
        await generate(service.triton, *service.samples.watch(requests[0], sinks[0]))
        return
    share = Share(service, requests[0].model.rows)

    async def generate_one(request: SequenceRequest, sink: Sink) -> None:
        async with share:
            await generate(service.triton, *service.samples.watch(request, sink))

    tasks = [asyncio.create_task(generate_one(*each)) for each in zip(requests, sinks, strict=True)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
