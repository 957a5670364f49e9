"""Clients of token streams in processes of their own: gRPC to Triton, and server-sent events of an OpenAI API.

A client in the measuring process would take the time that the engine in that process needs, so each side is asked from
worker processes, which keep their connections from turn to turn.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

import grpc  # type: ignore[import-untyped]

from benchmarks.serving.token_overhead import Arrivals, Side, prompts_of, through_triton
from evaluation.speed.prompts.workload import LoadPrompt
from handover.errors import ServerError

_EVENT, _END = b"data: {", b"data: [DONE]"
_MOST_CLIENTS = 32
"""Clients of one worker process; more would wait for each other's Python."""


@dataclass(frozen=True)
class Target:
    """A server and what it is asked.

    Attributes:
        url: ``http://host:port`` of an OpenAI API, or ``host:port`` of Triton's gRPC.
        model: name of the model there.
        ids: the prompt's tokens.
        output_length: tokens to generate.
        are_alike: whether all requests have this prompt; else each has its tokens in another order.
    """

    url: str
    model: str
    ids: tuple[int, ...]
    output_length: int
    are_alike: bool = True

    @property
    def is_http(self) -> bool:
        """Whether it is an OpenAI API."""
        return self.url.startswith("http")


class EventConnection(asyncio.Protocol):
    """One connection to an OpenAI API, kept from request to request; an answer is scanned, not parsed."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._tail, self._chunks = b"", list[int]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Note when events came."""
        now = time.perf_counter_ns()
        if self._done is None or self._done.done():
            return
        text = self._tail + data
        if text.startswith(b"HTTP/1.1 ") and not text.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(ServerError(f"the request was refused: {text.decode(errors='replace')[:2000]}"))
            return
        if _EVENT in text:
            self._chunks.append(now)
            text = text[text.rfind(_EVENT) + len(_EVENT) :]
        is_over = _END in text and text.endswith(b"0\r\n\r\n")
        self._tail = text if _END in text else text[-len(_END) :]
        if is_over:
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is under way."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(ServerError(f"the connection was closed in an answer: {exc}"))

    async def ask(self, request: bytes, tokens: int) -> Arrivals:
        """Send a request and wait for the end of its stream."""
        assert self._transport is not None
        self._done, self._tail, self._chunks = asyncio.get_running_loop().create_future(), b"", []
        sent_ns = time.perf_counter_ns()
        self._transport.write(request)
        await self._done
        return Arrivals(sent_ns, tuple(self._chunks), tokens)


def through_events(target: Target) -> Side:
    """Ask ``/v1/completions`` for streams, greedily and to their full length, each over a connection of its own."""
    place, prompt = urlsplit(target.url), LoadPrompt(target.ids, target.output_length)
    kept: list[EventConnection] = []

    async def ask(count: int) -> list[Arrivals]:
        loop = asyncio.get_running_loop()
        while len(kept) < count:
            kept.append((await loop.create_connection(EventConnection, place.hostname, place.port))[1])
        requests = [_request(target, place.netloc, each.ids) for each in prompts_of(prompt, count, target.are_alike)]
        asked = zip(kept, requests, strict=False)  # more may be kept from a turn of more clients
        return await asyncio.gather(*(each.ask(request, target.output_length) for each, request in asked))

    return ask


def _request(target: Target, host: str, ids: Sequence[int]) -> bytes:
    body = {
        "model": target.model,
        "prompt": ids,
        "max_tokens": target.output_length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


class _Worker:
    """What a worker process keeps: its event loop, and its connections to each target."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._sides: dict[Target, Side] = {}

    def ask(self, target: Target, count: int) -> list[Arrivals]:
        return self._loop.run_until_complete(self._ask(target, count))

    async def _ask(self, target: Target, count: int) -> list[Arrivals]:
        if target not in self._sides:
            if target.is_http:
                self._sides[target] = through_events(target)
            else:
                prompt = LoadPrompt(target.ids, target.output_length)
                channel = grpc.aio.insecure_channel(target.url)
                self._sides[target] = through_triton(channel, target.model, prompt, are_alike=target.are_alike)
        return await self._sides[target](count)


_workers: list[_Worker] = []


def _ask(target: Target, count: int) -> list[Arrivals]:
    if not _workers:
        _workers.append(_Worker())
    return _workers[0].ask(target, count)


class Crowd:
    """Worker processes that ask.

    Args:
        clients: most of them at a time.
    """

    def __init__(self, clients: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pools = [ProcessPoolExecutor(1, context) for _ in range(-(-clients // _MOST_CLIENTS))]

    def ask(self, target: Target, count: int) -> list[Arrivals]:
        """Send that many requests at once and wait for all answers."""
        needed = -(-count // _MOST_CLIENTS)
        shares = [count // needed + (index < count % needed) for index in range(needed)]
        pools: Sequence[ProcessPoolExecutor] = self._pools[:needed]
        under_way = [pool.submit(_ask, target, share) for pool, share in zip(pools, shares, strict=True)]
        return [arrival for each in under_way for arrival in each.result()]

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools:
            pool.shutdown()
