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
        async for index, piece in pieces:
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
    answers = [Answer() for _ in plan.requests]
    response = web.StreamResponse(headers=_EVENT_STREAM)
    async with aclosing(_pieces(triton, plan.requests)) as pieces:
        try:
            async for index, piece in pieces:
                if not response.prepared:
                    await response.prepare(request)
                is_first = not answers[index].tokens
                answers[index].add(piece)
                if is_first and (beginning := plan.form.beginning(index, answers[index])) is not None:
                    await _send(response, plan, [beginning])
                await _send(response, plan, [plan.form.part(index, answers[index], piece)])
        except ApiError as error:
            if not response.prepared:
                raise
            await response.write(_event(error.body))
    if plan.wants_usage:
        await _send(response, plan, [], {"usage": plan.usage(answers)})
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response, plan.usage(answers)


async def _send(
    response: web.StreamResponse, plan: Plan, choices: list[dict[str, Any]], more: dict[str, Any] | None = None
) -> None:
    usage = {"usage": None} if plan.wants_usage else {}
    content = {**plan.head, "object": plan.form.chunk_kind, "choices": choices, **usage, **(more or {})}
    await response.write(_event(content))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _pieces(triton: Triton, requests: Sequence[SequenceRequest]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Yield the pieces of all answers as they come, each with its answer's number; the first failure ends them all."""
    if len(requests) == 1:
        async with aclosing(generate(triton, requests[0])) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    arrived: asyncio.Queue[tuple[int, Piece | None | Exception]] = asyncio.Queue()
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
    arrived: asyncio.Queue[tuple[int, Piece | None | Exception]],
) -> None:
    try:
        async with aclosing(generate(triton, request)) as pieces:
            async for piece in pieces:
                arrived.put_nowait((index, piece))
        arrived.put_nowait((index, None))
    except Exception as error:  # is raised where the pieces are read
        arrived.put_nowait((index, error))
