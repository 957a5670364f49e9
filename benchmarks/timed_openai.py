"""An OpenAI completions API in a process of its own that answers with fixed delays, for comparing clients alone."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from aiohttp import web

MODEL = "timed"


@contextmanager
def timed_api(first_s: float, each_s: float) -> Iterator[str]:
    """Serve streams whose first token comes after ``first_s`` and each further one after ``each_s``; yields its URL."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(theirs, first_s, each_s), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}/v1"
    finally:
        process.terminate()
        process.join()


def _run(pipe: Connection, first_s: float, each_s: float) -> None:
    asyncio.run(_serve(pipe, first_s, each_s))


async def _serve(pipe: Connection, first_s: float, each_s: float) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        count, loop = body["max_tokens"], asyncio.get_running_loop()
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        due_s = loop.time() + first_s
        await answer.prepare(request)
        for _ in range(count):
            await asyncio.sleep(due_s - loop.time())
            due_s += each_s  # a token that comes late does not make the next one late
            await _event(answer, {"choices": [{"index": 0, "text": " word", "finish_reason": None}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        await _event(answer, {"choices": [], "usage": usage})
        await answer.write(b"data: [DONE]\n\n")
        return answer

    application = web.Application()
    application.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    pipe.send(runner.addresses[0][1])
    await asyncio.Event().wait()


async def _event(answer: web.StreamResponse, content: dict[str, object]) -> None:
    event = {"id": "timed", "object": "text_completion", "model": MODEL, **content}
    await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
