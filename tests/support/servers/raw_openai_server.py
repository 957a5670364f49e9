"""A small OpenAI server on bare asyncio streams that says when it sent what: the oracle of the load generator's times.

It shares no code with the client that is tested, not even an HTTP library. Its delays are set, and it notes for each
request by the clock of this process when the request was read and when each token was written.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

VLLM_FIELDS = frozenset({"ignore_eos", "min_tokens", "return_token_ids", "stream_options"})
_FIELDS = frozenset({"model", "prompt", "messages", "max_tokens", "temperature", "stream", "echo", "logprobs"})


@dataclass
class Exchange:
    """What happened to one request, in nanoseconds of ``time.perf_counter_ns``."""

    body: dict[str, Any]
    read_ns: int
    token_ns: list[int] = field(default_factory=list)


class RawServer:
    """Listens on a free loopback port while the ``with`` block runs.

    Args:
        first_s, each_s: delay before the first event with tokens, and before each further one.
        chunk: tokens in an event.
        pause_after, pause_s: tokens after which a stream waits for the client to hang up, and for how long at most.
        fields: of vLLM that it takes; others are refused.
        takes_ids, takes_lists, is_chat_only: what it can do.
        key: bearer key that it wants.
        metrics: text of its /metrics; empty for none.
        date: what its clock says, in the head of each answer; empty for nothing.
    """

    def __init__(self, **settings: Any) -> None:
        self.first_s, self.each_s, self.chunk = settings.pop("first_s", 0.0), settings.pop("each_s", 0.0), 1
        self.fields: frozenset[str] = settings.pop("fields", VLLM_FIELDS)
        self.takes_ids = self.takes_lists = True
        self.is_chat_only, self.key, self.metrics, self.date = False, "", "", ""
        self.end_after: int | None = None
        self.pause_after, self.pause_s = 0, 10.0
        vars(self).update(settings)
        self.faults: list[str] = []
        self.exchanges: list[Exchange] = []
        self.in_flight = self.most_in_flight = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> RawServer:
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop)
        self._server = started.result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(240)
        self._loop.close()

    async def _stop(self) -> None:
        self._server.close()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; returns whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        lines = [line.partition(":") for line in head.split("\r\n")[1:]]
        headers = {name.strip().lower(): value.strip() for name, _, value in lines}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return await self._plain(writer, 401, {"error": {"message": "wrong key"}})
        if method == "GET":
            return await self._get(writer, path)
        body, read_ns = json.loads(content), time.perf_counter_ns()
        fault = self.faults.pop(0) if self.faults else ""
        if fault and fault != "cut" and fault != "error event":
            return await self._fault(writer, fault)
        refusal = self._refusal(path, body)
        if refusal:
            return await self._plain(writer, 400, {"error": {"message": refusal}})
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._generate(reader, writer, Exchange(body, read_ns), fault)
        finally:
            self.in_flight -= 1

    async def _get(self, writer: asyncio.StreamWriter, path: str) -> bool:
        if path == "/v1/models":
            return await self._plain(writer, 200, {"data": [{"id": "raw", "owned_by": "raw", "max_model_len": 4096}]})
        if path == "/metrics" and self.metrics:
            return await self._send(writer, 200, "text/plain", self.metrics.encode())
        return await self._plain(writer, 404, {"detail": "Not Found"})

    async def _fault(self, writer: asyncio.StreamWriter, fault: str) -> bool:
        if fault == "html":
            return await self._send(writer, 200, "text/html", b"<html><body>Please log in</body></html>")
        if fault == "busy":
            refusal = json.dumps({"error": {"message": "too many requests"}}).encode()
            return await self._send(writer, 429, "application/json", refusal, "Retry-After: 3600\r\n")
        if fault == "busy until":
            refusal = json.dumps({"error": {"message": "try again at noon"}}).encode()
            return await self._send(writer, 503, "application/json", refusal, f"Retry-After: {self.date}\r\n")
        if fault == "revoked":
            return await self._plain(writer, 401, {"error": {"message": "the key is no longer valid"}})
        if fault == "moved":
            return await self._send(writer, 302, "text/plain", b"", "Location: http://127.0.0.1:9/elsewhere\r\n")
        if fault == "hang":
            await asyncio.sleep(30)
        if fault == "trickle":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
            for _ in range(300):
                writer.write(b": still here\n")
                await asyncio.sleep(0.05)
        if fault == "gone":
            self._server.close()
        return False  # "close": the connection ends without an answer

    def _refusal(self, path: str, body: dict[str, Any]) -> str:
        if path.endswith("/chat/completions") != self.is_chat_only:
            return "no such path"
        unknown = set(body) - _FIELDS - self.fields
        if unknown:
            return f"unknown fields {sorted(unknown)}"
        given = body.get("prompt", "")
        is_list = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        if is_list and not self.takes_lists:
            return "one prompt only"
        return "text only" if isinstance(given, list) and not is_list and not self.takes_ids else ""

    def _lengths(self, body: dict[str, Any]) -> Sequence[int]:
        """Tokens of each prompt; a word of a text is a token."""
        if "messages" in body:
            return [len(body["messages"][0]["content"].split()) + 3]  # three of the chat template
        given = body["prompt"]
        prompts = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        return [len(prompt.split()) if isinstance(prompt, str) else len(prompt) for prompt in prompts]

    async def _generate(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, exchange: Exchange, fault: str
    ) -> bool:
        body, lengths = exchange.body, self._lengths(exchange.body)
        wanted = body["max_tokens"]
        if self.end_after is not None and not body.get("ignore_eos"):
            wanted = min(wanted, self.end_after)
        self.exchanges.append(exchange)
        usage = {"prompt_tokens": sum(lengths), "completion_tokens": wanted * len(lengths)}
        if not body.get("stream"):
            await asyncio.sleep(self.first_s + self.each_s * (wanted - 1))
            choices = [self._choice(body, index, wanted, whole=True) for index in range(len(lengths))]
            exchange.token_ns.append(time.perf_counter_ns())
            return await self._plain(writer, 200, {"choices": choices, "usage": usage})
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{self._dated}Transfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode())
        if self.is_chat_only:
            await self._event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for first in range(0, wanted, self.chunk):
            await asyncio.sleep(self.first_s if first == 0 else self.each_s)
            exchange.token_ns.append(time.perf_counter_ns())
            await self._event(writer, {"choices": [self._choice(body, 0, min(self.chunk, wanted - first))]})
            if len(exchange.token_ns) == self.pause_after < wanted and await self._is_hung_up(reader):
                return False
            if fault == "cut" and first:
                return False
            if fault == "error event" and first:
                await self._event(writer, {"error": {"message": "the engine has died"}})
        if body.get("stream_options", {}).get("include_usage"):
            await self._event(writer, {"choices": [], "usage": usage})
        await self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _is_hung_up(self, reader: asyncio.StreamReader) -> bool:
        """Wait for the end of what the client sends."""
        try:
            return not await asyncio.wait_for(reader.read(1), self.pause_s)
        except asyncio.TimeoutError:  # noqa: UP041 -- in Python 3.10 it is not the built-in one
            return False

    @property
    def _dated(self) -> str:
        return f"Date: {self.date}\r\n" if self.date else ""

    def _choice(self, body: dict[str, Any], index: int, count: int, whole: bool = False) -> dict[str, Any]:
        text = " word" * count
        choice: dict[str, Any] = {"index": index, "finish_reason": "length" if whole else None}
        if self.is_chat_only:
            choice["message" if whole else "delta"] = {"content": text}
        else:
            choice["text"] = text
        return choice | ({"token_ids": [7] * count} if body.get("return_token_ids") else {})

    async def _event(self, writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
        await self._chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")

    async def _chunk(self, writer: asyncio.StreamWriter, content: bytes) -> None:
        writer.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        await writer.drain()

    async def _plain(self, writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> bool:
        return await self._send(writer, status, "application/json", json.dumps(content).encode())

    async def _send(
        self, writer: asyncio.StreamWriter, status: int, kind: str, content: bytes, further: str = ""
    ) -> bool:
        head = f"HTTP/1.1 {status} Said\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
        writer.write(f"{head}{self._dated}{further}\r\n".encode() + content)
        await writer.drain()
        return True
