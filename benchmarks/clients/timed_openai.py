"""An OpenAI completions API in a process of its own that answers with fixed delays, for comparing clients alone.

It notes when it had each request and when it wrote each token, by the clock that all processes of a Linux host share,
so that it is known how much of what a client reports was in the server.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from aiohttp import web

MODEL = "timed"
_EXCHANGES = "/exchanges"


@dataclass(frozen=True)
class Exchange:
    """One request as the server saw it, in ns of ``time.perf_counter_ns``.

    Attributes:
        read_ns: when the head of the request was there.
        first_ns, last_ns: just before the first and the last token were written.
    """

    read_ns: int
    first_ns: int
    last_ns: int


@dataclass(frozen=True)
class TimedApi:
    """A running server.

    Attributes:
        url: base URL of its API.
    """

    url: str

    def take_exchanges(self) -> list[Exchange]:
        """Return the exchanges that ended since the last call, in the order of their ends."""
        with urllib.request.urlopen(self.url.removesuffix("/v1") + _EXCHANGES, timeout=10) as answer:
            return [Exchange(**each) for each in json.load(answer)]


@contextmanager
def timed_api(first_s: float, each_s: float) -> Iterator[TimedApi]:
    """Serve streams whose first token comes after ``first_s`` and each further one after ``each_s``."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(theirs, first_s, each_s), daemon=True)
    process.start()
    try:
        yield TimedApi(f"http://127.0.0.1:{ours.recv()}/v1")
    finally:
        process.terminate()
        process.join()


def _run(pipe: Connection, first_s: float, each_s: float) -> None:
    asyncio.run(_serve(pipe, _Delays(first_s, each_s)))


class _Delays:
    """Handlers of the server."""

    def __init__(self, first_s: float, each_s: float) -> None:
        self._first_s, self._each_s = first_s, each_s
        self._exchanges: list[Exchange] = []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer by a stream of tokens."""
        read_ns, loop = time.perf_counter_ns(), asyncio.get_running_loop()
        due_s = loop.time() + self._first_s
        body = await request.json()
        count, written_ns = body["max_tokens"], list[int]()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for _ in range(count):
            await asyncio.sleep(due_s - loop.time())
            due_s += self._each_s  # a token that comes late does not make the next one late
            written_ns.append(time.perf_counter_ns())
            await _event(answer, {"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        await _event(answer, {"choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")
        self._exchanges.append(Exchange(read_ns, written_ns[0], written_ns[-1]))
        return answer

    async def exchanges(self, request: web.Request) -> web.Response:
        """Say what was noted, and forget it."""
        taken, self._exchanges = self._exchanges, []
        return web.json_response([asdict(each) for each in taken])


async def _serve(pipe: Connection, delays: _Delays) -> None:
    application = web.Application()
    application.router.add_post("/v1/completions", delays.complete)
    application.router.add_get(_EXCHANGES, delays.exchanges)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    pipe.send(runner.addresses[0][1])
    await asyncio.Event().wait()


async def _event(answer: web.StreamResponse, content: dict[str, object]) -> None:
    event = {"id": "timed", "object": "text_completion", "model": MODEL, **content}
    await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
