"""The way of a request of an API for agents: written as one of chat completions, answered in that API's form."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from aiohttp import web

from deployment.openai.agents.blocks import Block, Blocks, Change
from deployment.openai.answers.answering import CUT
from deployment.openai.answers.chat import ChatForm, plan_chat
from deployment.openai.answers.event_stream import EventStream
from deployment.openai.answers.reading import Body, read_asked
from deployment.openai.engine.generation import LENGTH, Piece, generate
from deployment.openai.engine.tensors import check_offered
from deployment.openai.errors import ApiError
from deployment.openai.service import RECORD, service_of
from deployment.openai.texts.preparing import KINDS
from deployment.openai.tools.reading import AnswerReader

Event = tuple[str, dict[str, Any]]
"""Its type, and what it says."""


class Ended(NamedTuple):
    """How an answer ended.

    Attributes:
        is_cut: whether by its limit of tokens.
        stop: the stop string that ended it, if one did.
        has_called: whether it calls.
        prompt_tokens, tokens: of the conversation and of the answer.
    """

    is_cut: bool
    stop: str | None
    has_called: bool
    prompt_tokens: int
    tokens: int


class Api(Protocol):
    """How one request's answer is written."""

    @property
    def chat(self) -> dict[str, Any]:
        """The request as a body of chat completions."""

    def begin(self, identity: str, model: str, prompt_tokens: int) -> Iterable[Event]:
        """Note what an answer is called; yields the events that a stream begins with."""

    def change(self, change: Change) -> Iterable[Event]:
        """Yield the events of a change."""

    def end(self, blocks: Sequence[Block], ended: Ended) -> Iterable[Event]:
        """Yield the events that a stream ends with."""

    def whole(self, blocks: Sequence[Block], ended: Ended) -> dict[str, Any]:
        """Write the whole answer."""

    def fail(self, error: ApiError) -> Event:
        """Write the event of a failure in the middle of a stream."""


async def count(request: web.Request, api: Api) -> int:
    """Return how many tokens the conversation of a request has; ApiError: it is refused."""
    service = service_of(request)
    with service.admitted():
        _, model, prompts = await read_asked(service, "chat", Body(json.dumps(api.chat).encode()))
        assert isinstance(prompts, tuple)
        request[RECORD].model = model.names[0]
        return len(prompts[0].ids)


async def answer(request: web.Request, api: Api, is_streamed: bool) -> web.StreamResponse:
    """Answer a request whose body was read.

    Raises:
        ApiError: the request is refused, or the server failed on it before a stream began.
    """
    service, record = service_of(request), request[RECORD]
    with service.admitted():
        body = Body(json.dumps(api.chat).encode())
        values, model, prompts = await read_asked(service, "chat", body)
        assert isinstance(prompts, tuple)
        record.model = model.names[0]
        check_offered(values, KINDS["chat"].table, model)
        plan = await service.turns.run(plan_chat(request, values, model, prompts))
        assert isinstance(plan.form, ChatForm)
        reader = plan.form.reader() if plan.form.reader else AnswerReader(None, None, None)
        stream = EventStream(request) if is_streamed else None
        sink = _Sink(api, reader, stream, plan.prompt_tokens)
        sink.first = list(api.begin(record.id, values["model"] or model.names[0], plan.prompt_tokens))
        try:
            await generate(service.triton, *service.samples.watch(plan.requests[0], sink))
        except ApiError as error:
            if stream is None or not stream.has_begun:
                raise
            stream.hold(written(api.fail(error)))
        except asyncio.CancelledError:
            if stream is not None and stream.has_begun:
                with contextlib.suppress(ConnectionError):
                    stream.cut(written(api.fail(CUT)))
            raise
        ended = sink.ended
        record.usage = plan.usage_of(ended.tokens)
        if stream is None:
            return web.json_response(api.whole(sink.blocks.all, ended))
        await stream.write_eof()
        return stream


class _Sink:
    """Takes the pieces of the one answer.

    Args:
        api: writes it.
        reader: of its thoughts and calls.
        stream: that events go to; None: the answer is written whole.
        prompt_tokens: of the conversation.
    """

    def __init__(self, api: Api, reader: Any, stream: EventStream | None, prompt_tokens: int) -> None:
        self._api, self._reader, self._stream, self._prompt_tokens = api, reader, stream, prompt_tokens
        self.blocks, self.first, self._tokens = Blocks(), list[Event](), 0
        self._last: Piece | None = None

    @property
    def ended(self) -> Ended:
        """How the answer has ended."""
        last = self._last or Piece("")
        stop = last.stop_reason if isinstance(last.stop_reason, str) else None
        is_cut = last.finish_reason == LENGTH
        return Ended(is_cut, stop, self._reader.has_called, self._prompt_tokens, self._tokens)

    def get_ready(self) -> None:
        """Write the head of the stream."""
        if self._stream:
            self._stream.get_ready()

    def put(self, pieces: Sequence[Piece]) -> bool:
        """Take pieces; returns whether the client is far behind."""
        events, self.first = self.first, []
        for piece in pieces:
            self._tokens += len(piece.tokens)
            self._last = piece
            is_last = piece.finish_reason is not None
            for change in self.blocks.add(self._reader.feed(piece.text, is_last)):
                events += self._api.change(change)
            if is_last:
                for change in self.blocks.end(piece.finish_reason == LENGTH):
                    events += self._api.change(change)
        if self._stream is None:
            return False
        if self._last is None or self._last.finish_reason is None:
            return bool(events) and self._stream.send(b"".join(map(written, events)))
        events += self._api.end(self.blocks.all, self.ended)
        self._stream.hold(b"".join(map(written, events)))  # the end of the response follows at once
        return False

    async def catch_up(self) -> None:
        """Wait until the client is no more behind."""
        if self._stream:
            await self._stream.catch_up()


def written(event: Event) -> bytes:
    """Write an event."""
    kind, content = event
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content}, ensure_ascii=False)}\n\n".encode()
