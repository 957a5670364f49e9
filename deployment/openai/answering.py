"""Ask for all answers of a request side by side, and give them whole or as a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from deployment.openai.errors import ApiError
from deployment.openai.generation import Piece, SequenceRequest, generate
from deployment.openai.scores import Score
from deployment.openai.triton import Triton

_EVENT_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_ANY_TEXT = "\ue000"
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass
class Answer:
    """An answer as far as it has come.

    Attributes:
        text: without what ended it.
        tokens: with the token that ended it, if one did.
        scores: of the tokens, where log probabilities were asked for.
        prompt_scores: of the prompt's tokens but the first, where they were asked for.
        finish_reason, stop_reason: as in ``Piece``.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    prompt_scores: tuple[Score, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.scores += piece.scores
        self.prompt_scores = self.prompt_scores or piece.prompt_scores
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


class Form(Protocol):
    """How the answers of an endpoint are written."""

    @property
    def kind(self) -> str:
        """Name of the whole answer's object."""

    @property
    def chunk_kind(self) -> str:
        """Name of a stream's objects."""

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """Write a whole answer."""

    def beginning(self, index: int, answer: Answer) -> dict[str, Any] | None:
        """Write what a stream's answer begins with, before its first token; None: nothing."""

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
        made = sum(len(answer.tokens) for answer in answers)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
        }


async def answer_whole(triton: Triton, plan: Plan) -> dict[str, Any]:
    """Return the answer to a request once it is complete.

    Raises:
        ApiError: the server failed on a part of it; the other parts are cancelled.
    """
    answers = [Answer() for _ in plan.requests]
    async with aclosing(_pieces(triton, plan.requests)) as pieces:
        async for index, together in pieces:
            for piece in together:
                answers[index].add(piece)
    kept: list[Answer] = []
    for first in range(0, len(answers), plan.drawn):
        kept += _best(answers[first : first + plan.drawn], plan.given)
    choices = [plan.form.choice(index, answer) for index, answer in enumerate(kept)]
    return {**plan.head, "object": plan.form.kind, "choices": choices, "usage": plan.usage(answers)}


def _best(answers: list[Answer], count: int) -> list[Answer]:
    """Keep the answers whose tokens are most probable on average."""
    if count == len(answers):
        return answers
    return sorted(answers, key=_mean_log_prob, reverse=True)[:count]


def _mean_log_prob(answer: Answer) -> float:
    return sum(score.log_prob for score in answer.scores) / max(1, len(answer.scores))


async def answer_stream(request: web.Request, triton: Triton, plan: Plan) -> tuple[web.StreamResponse, dict[str, int]]:
    """Send the answer to a request as events, one a token; the stream begins when the first token is there.

    Returns:
        The response, which is complete, and the usage.

    Raises:
        ApiError: the server refused the request, so that no stream has begun. Later failures are an event.
    """
    answers, events = [Answer() for _ in plan.requests], _Events(plan)
    response = web.StreamResponse(headers=_EVENT_STREAM)
    async with aclosing(_pieces(triton, plan.requests)) as pieces:
        try:
            async for index, together in pieces:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(events.of_pieces(index, answers[index], together))
        except ApiError as error:
            if not response.prepared:
                raise
            await response.write(_event(_JSON.encode(error.body)))
    usage = plan.usage(answers)
    await response.write_eof((events.of_usage(usage) if plan.wants_usage else b"") + _event("[DONE]"))
    return response, usage


class _Events:
    """Writes the events of one stream; what all of them have is encoded once, of most all but the text.

    Args:
        plan: of the request.
    """

    def __init__(self, plan: Plan) -> None:
        self._form = plan.form
        self._before = _JSON.encode({**plan.head, "object": plan.form.chunk_kind})[:-1] + ',"choices":['
        self._after = '],"usage":null}' if plan.wants_usage else "]}"
        self._around: dict[int, tuple[str, str]] = {}

    def of_pieces(self, index: int, answer: Answer, pieces: Sequence[Piece]) -> bytes:
        """Add pieces to an answer and write an event for each."""
        events = list[bytes]()
        for piece in pieces:
            is_first = not answer.tokens
            answer.add(piece)
            if is_first and (beginning := self._form.beginning(index, answer)) is not None:
                events.append(self._of_choice(beginning))
            if self._form.is_text_alone and piece.finish_reason is None:
                before, after = self._around.get(index) or self._set_around(index, answer)
                events.append(f"{before}{_JSON.encode(piece.text)}{after}".encode())
            else:
                events.append(self._of_choice(self._form.part(index, answer, piece)))
        return b"".join(events)

    def _set_around(self, index: int, answer: Answer) -> tuple[str, str]:
        """Write what stands around the text in the events of an answer that goes on."""
        event = self._of_choice(self._form.part(index, answer, Piece(_ANY_TEXT))).decode()
        before, _, after = event.rpartition(f'"{_ANY_TEXT}"')
        self._around[index] = before, after
        return before, after

    def of_usage(self, usage: dict[str, int]) -> bytes:
        """Write the event that a stream ends with where the usage is asked for."""
        return _event(f'{self._before}],"usage":{_JSON.encode(usage)}}}')

    def _of_choice(self, choice: dict[str, Any]) -> bytes:
        return _event(self._before + _JSON.encode(choice) + self._after)


def _event(content: str) -> bytes:
    return f"data: {content}\n\n".encode()


async def _pieces(triton: Triton, requests: Sequence[SequenceRequest]) -> AsyncGenerator[tuple[int, list[Piece]], None]:
    """Yield the pieces of all answers as they come, each with its answer's number; the first failure ends them all."""
    if len(requests) == 1:
        async with aclosing(generate(triton, requests[0])) as pieces:
            async for together in pieces:
                yield 0, together
        return
    arrived: asyncio.Queue[tuple[int, list[Piece] | None | Exception]] = asyncio.Queue()
    tasks = [asyncio.create_task(_pass_on(triton, index, each, arrived)) for index, each in enumerate(requests)]
    try:
        running = len(tasks)
        while running:
            index, item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pass_on(
    triton: Triton,
    index: int,
    request: SequenceRequest,
    arrived: asyncio.Queue[tuple[int, list[Piece] | None | Exception]],
) -> None:
    try:
        async with aclosing(generate(triton, request)) as pieces:
            async for together in pieces:
                arrived.put_nowait((index, together))
        arrived.put_nowait((index, None))
    except Exception as error:  # is raised where the pieces are read
        arrived.put_nowait((index, error))
