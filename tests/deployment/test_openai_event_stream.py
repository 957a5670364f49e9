"""The response of events as clients of HTTP/1.1 and 1.0 read it, with one that is slow and one that goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from email.utils import parsedate_to_datetime
from http import HTTPStatus

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from deployment.openai.answers.event_stream import EventStream
from deployment.openai.service import begin_record

EVENTS = (b"data: one\n\n", b"data: two\n\n")
LARGE = b"data: " + b"x" * (1 << 20) + b"\n\n"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def send_events(request: web.Request) -> web.StreamResponse:
    begin_record(request)
    stream = EventStream(request)
    stream.get_ready()
    stream.send(EVENTS[0])
    await stream.write_eof(EVENTS[1])
    return stream


async def send_whole(request: web.Request) -> web.StreamResponse:
    begin_record(request)
    return web.Response(text="whole")


def converse(handler: Handler, client: Client) -> None:
    """Let a client talk with a server of one handler."""

    async def inside() -> None:
        application = web.Application()
        application.router.add_get("/events", handler)
        application.router.add_get("/whole", send_whole)
        async with TestServer(application, handler_cancellation=True) as server:
            reader, writer = await asyncio.open_connection(server.host, server.port)
            await asyncio.wait_for(client(reader, writer), 240)
            writer.close()

    asyncio.run(inside())


async def read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    return status, dict(line.split(": ", 1) for line in lines)


def test_a_stream_without_last_events_ends_once() -> None:
    async def send_all(request: web.Request) -> web.StreamResponse:
        begin_record(request)
        stream = EventStream(request)
        stream.get_ready()
        stream.send(EVENTS[0])
        await stream.write_eof()
        return stream

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for path in ("events", "whole"):
            writer.write(f"GET /{path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            status, _ = await read_head(reader)
            assert status == "HTTP/1.1 200 OK"
            if path == "events":
                size = int(await reader.readline(), 16)
                assert await reader.readexactly(size + 2) == EVENTS[0] + b"\r\n"
                assert await reader.readexactly(5) == b"0\r\n\r\n"

    converse(send_all, client)


def test_a_stream_has_the_head_of_other_answers_and_leaves_its_connection_open() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\nX-Request-Id: mine\r\n\r\n")
            status, head = await read_head(reader)
            assert status == f"HTTP/1.1 200 {HTTPStatus.OK.phrase}"
            assert await reader.readuntil(b"\r\n0\r\n\r\n") == b"b\r\n%b\r\nb\r\n%b\r\n0\r\n\r\n" % EVENTS
        writer.write(b"GET /whole HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        _, other = await read_head(reader)
        assert parsedate_to_datetime(head.pop("Date")) <= parsedate_to_datetime(other["Date"])
        assert head == {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "Transfer-Encoding": "chunked",
            "Server": other["Server"],
            "X-Request-Id": "mine",
        }

    converse(send_events, client)


@pytest.mark.parametrize(
    ("asked", "end"),
    [
        (b"HTTP/1.1\r\nHost: x\r\nConnection: close", b"b\r\n%b\r\nb\r\n%b\r\n0\r\n\r\n" % EVENTS),
        (b"HTTP/1.0", b"".join(EVENTS)),
        (b"HTTP/1.0\r\nConnection: keep-alive", b"".join(EVENTS)),
    ],
)
def test_a_connection_that_serves_no_other_request_is_closed(asked: bytes, end: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /events %b\r\n\r\n" % asked)
        status, head = await read_head(reader)
        assert status == f"{asked[:8].decode()} 200 OK"
        assert ("Transfer-Encoding" in head, head.get("Connection")) == (
            (True, "close") if b"1.1" in asked else (False, None)
        )
        assert await reader.read() == end

    converse(send_events, client)


@pytest.mark.parametrize(
    ("version", "content"), [(b"1.1", b"16\r\n%b%b\r\n0\r\n\r\n" % EVENTS), (b"1.0", b"".join(EVENTS))]
)
def test_what_is_held_comes_with_the_end_in_one_write(
    version: bytes, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[bytes] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        begin_record(request)
        assert request.transport is not None
        write = request.transport.write

        def note(data: bytes) -> None:
            writes.append(data)
            write(data)

        monkeypatch.setattr(request.transport, "write", note)
        stream = EventStream(request)
        stream.get_ready()
        stream.hold(EVENTS[0])
        assert not (writes or stream.has_begun)
        await stream.write_eof(EVENTS[1])
        return stream

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /events HTTP/%b\r\nHost: x\r\n\r\n" % version)
        await read_head(reader)
        assert await reader.readexactly(len(content)) == content

    converse(handler, client)
    assert len(writes) == 1 and writes[0].endswith(content)


def test_a_client_that_does_not_read_is_behind_until_it_does() -> None:
    states: list[bool] = []
    is_behind = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        begin_record(request)
        stream = EventStream(request)
        stream.get_ready()
        states.append(stream.send(EVENTS[0]))
        while not states[-1]:
            states.append(stream.send(LARGE))
        is_behind.set()
        await stream.catch_up()
        states.append(stream.send(EVENTS[0]))
        await stream.write_eof(EVENTS[1])
        return stream

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /events HTTP/1.0\r\n\r\n")
        await is_behind.wait()
        await asyncio.sleep(0.1)
        large = len(states) - 1
        assert len(states) == 1 + large  # it waits
        await read_head(reader)
        assert await reader.read() == EVENTS[0] + LARGE * large + EVENTS[0] + EVENTS[1]
        assert states == [False] * large + [True, False]

    converse(handler, client)


def test_a_client_that_has_gone_is_an_error() -> None:
    failures: list[Exception] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        begin_record(request)
        stream = EventStream(request)
        stream.get_ready()
        assert request.transport is not None
        request.transport.abort()
        try:
            stream.send(EVENTS[0])
        except ConnectionResetError as error:
            failures.append(error)
        return stream

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await reader.read() == b""

    converse(handler, client)
    assert len(failures) == 1
