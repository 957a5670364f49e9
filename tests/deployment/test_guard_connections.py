"""How long the guard waits for what a client sends, and how many connections it holds; no server stands behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest

from deployment.guard import doors, events, frames
from deployment.guard.checks import Checks
from deployment.guard.doors import Client, Door
from deployment.guard.grpc_door import GrpcClient
from deployment.guard.http_door import HttpClient
from deployment.guard.limits import Memory

Talk = Callable[[Door, Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]], Awaitable[Any]]


def talk(make: Callable[[Door], Client], talking: Talk, most_bytes: int = 1000) -> Any:
    """Open a door with silence behind it, and let a client talk to it."""

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        door = Door(silent.sockets[0].getsockname()[:2], most_bytes, Memory(4 * most_bytes), Checks())
        server = await loop.create_server(lambda: make(door), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        return await talking(door, lambda: asyncio.open_connection(*address))

    return events.run(asyncio.wait_for(run(), 240))


async def settle(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


HALF_A_MESSAGE = frames.frame(frames.DATA, 0, 1, b"\0\0\0\1\0a")
HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: t\r\n"


@pytest.mark.parametrize(
    "begun", [HEAD, HEAD + b"Content-Length: 10\r\n\r\n[", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n[\r\n"]
)
def test_a_request_that_comes_in_too_slowly_is_told_so(begun: bytes) -> None:
    async def talking(door: Door, connect: Any) -> tuple[bool, bool, bytes]:
        reader, writer = await connect()
        writer.write(begun)
        await settle(lambda: any(client.is_coming for client in door._connections))
        (client,) = door._connections
        now = time.monotonic()
        early, late = client.is_late(now + 29), client.is_late(now + 31)
        client.give_up()
        return early, late, await reader.read()

    early, late, answer = talk(HttpClient, talking)
    assert (early, late) == (False, True) and answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize(
    "begun",
    [
        frames.PREFACE[:10],
        frames.PREFACE + b"\0\0",
        frames.PREFACE
        + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x83")
        + b"\0\0\6\0\0\0\0\0\1\0\0\0\1\0a",
    ],
)
def test_a_message_that_comes_in_too_slowly_ends_its_connection(begun: bytes) -> None:
    async def talking(door: Door, connect: Any) -> tuple[bool, bool, bytes]:
        reader, writer = await connect()
        writer.write(begun)
        await settle(lambda: any(client.triton for client in door._connections))
        await asyncio.sleep(0.1)
        (client,) = door._connections
        now = time.monotonic()
        early, late = client.is_late(now + 29), client.is_late(now + 61)
        client.give_up()
        await reader.read()
        return early, late, b""

    assert talk(GrpcClient, talking)[:2] == (False, True)


@pytest.mark.parametrize("make", [HttpClient, GrpcClient])
def test_the_connection_that_was_idle_for_longest_gives_way(
    make: Callable[[Door], Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "_MOST_CONNECTIONS", 2)

    async def talking(door: Door, connect: Any) -> list[bytes]:
        pairs = []
        for number in range(3):
            pairs.append(await connect())
            await settle(lambda number=number: len(door) == min(number + 1, 2))  # type: ignore[misc]
            await asyncio.sleep(0.05)
        ended = await asyncio.wait_for(pairs[0][0].read(), 5)
        return [ended, *(b"open" for reader, _ in pairs[1:] if not reader.at_eof())]

    assert talk(make, talking) == [b"", b"open", b"open"]


def test_bodies_of_all_connections_together_have_a_limit() -> None:
    async def talking(door: Door, connect: Any) -> list[bytes]:
        begun = HEAD + b"Content-Length: 1000\r\n\r\n" + b"[" * 990
        pairs = [await connect() for _ in range(5)]
        for _, writer in pairs:
            writer.write(begun)
            await asyncio.sleep(0.05)
        refused = await pairs[4][0].readline()
        for _, writer in pairs:
            writer.close()
        await settle(lambda: door.memory.used == 0)
        return [refused]

    assert talk(HttpClient, talking) == [b"HTTP/1.1 503 Service Unavailable\r\n"]


BODY = b'{"text": "a"}'
ALIKE = b"POST /v2/models/m/generate_stream HTTP/1.1\r\nHost: t\r\nContent-Length: %d\r\n\r\n" % len(BODY)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def pass_requests(parts: list[bytes], count: int) -> tuple[bytes, bytes]:
    """Send the parts of requests to a door; returns what the server behind it gets, and what the client does."""

    async def run() -> tuple[bytes, bytes]:
        got = bytearray()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                got.extend(head + await reader.readexactly(len(BODY)))
                writer.write(ANSWER)

        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        door = Door(server.sockets[0].getsockname()[:2], 1000, Memory(4000), Checks())
        public = await loop.create_server(lambda: HttpClient(door), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*public.sockets[0].getsockname()[:2])
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.005)
        answers = await reader.readexactly(count * len(ANSWER))
        writer.write(ALIKE + b"[" * len(BODY))
        return bytes(got), answers + await reader.readline()

    return events.run(asyncio.wait_for(run(), 240))


@pytest.mark.parametrize("size", [1, 7, len(ALIKE), len(ALIKE + BODY), 1000])
def test_requests_that_begin_alike_are_passed_on_whole_and_each_is_checked(size: int) -> None:
    sent = 3 * (ALIKE + BODY)
    parts = [sent[begin : begin + size] for begin in range(0, len(sent), size)]
    got, answers = pass_requests(parts, 3)
    assert got == sent
    assert answers == 3 * ANSWER + b"HTTP/1.1 400 Bad Request\r\n"


def pass_frames(parts: list[bytes], settings: bytes, until: bytes) -> bytes:
    """Send parts to a gRPC door; returns what the server behind it gets, which sends its settings first."""

    async def run() -> bytes:
        got = bytearray()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frames.frame(frames.SETTINGS, 0, 0, settings) + frames.window_update(0, 1 << 20))
            while data := await reader.read(1 << 16):
                got.extend(data)

        loop = asyncio.get_running_loop()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        door = Door(server.sockets[0].getsockname()[:2], 1 << 20, Memory(1 << 22), Checks())
        public = await loop.create_server(lambda: GrpcClient(door), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*public.sockets[0].getsockname()[:2])
        writer.write(frames.PREFACE + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x83"))
        await reader.readexactly(9 + len(settings))  # the server's settings
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.002)
        await settle(lambda: got.endswith(until))
        return bytes(got)

    got: bytes = events.run(asyncio.wait_for(run(), 240))
    return got


def test_frames_that_nothing_is_wrong_with_pass_as_they_are_and_in_order() -> None:
    whole = frames.frame(frames.DATA, 0, 1, b"\0\0\0\0\3\x0a\1a")
    padded = frames.frame(frames.DATA, frames.PADDED, 1, b"\2\0\0\0\0\3\x0a\1a\0\0")
    halves = frames.frame(frames.DATA, 0, 1, b"\0\0\0\0") + frames.frame(frames.DATA, 0, 1, b"\3\x0a\1a")
    update, ping = frames.window_update(1, 9), frames.frame(6, 0, 0, bytes(8))
    sent = update + whole + ping + padded + update + halves + ping + whole + update
    wanted = update + whole + ping + whole + update + whole + ping + whole + update
    begun = frames.PREFACE + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x83")
    for size in (len(sent), 10, 1):
        parts = [sent[begin : begin + size] for begin in range(0, len(sent), size)]
        assert pass_frames(parts, b"", wanted[-40:]) == begun + wanted


def test_what_a_setting_allows_follows_the_clients_acknowledgement_of_it() -> None:
    message = ModelInferRequest(model_name="a" * 70_000).SerializeToString()  # more than a call may have without it
    text = b"\0" + len(message).to_bytes(4, "big") + message
    sent = b"".join(frames.frame(frames.DATA, 0, 1, text[at : at + 16_000]) for at in range(0, len(text), 16_000))
    acknowledged = frames.frame(frames.SETTINGS, frames.ACK, 0)
    got = pass_frames([sent, acknowledged], b"\0\4" + (1 << 20).to_bytes(4, "big"), text[-9:])
    seen = [(kind, end - begin) for kind, _, _, begin, end in frames.split(got, len(frames.PREFACE), 1 << 20)]
    acknowledgement = seen.index((frames.SETTINGS, 0))
    before, after = (
        sum(size for kind, size in part if kind == frames.DATA)
        for part in (seen[:acknowledgement], seen[acknowledgement:])
    )
    assert (before, before + after) == (frames.FIRST_WINDOW, len(text))


def test_a_broken_http2_connection_is_closed_with_a_reason() -> None:
    cases = {
        b"GET / HTTP/1.1\r\nHost: t\r\n\r\n": b"",
        frames.PREFACE + frames.frame(frames.CONTINUATION, 0, 1): b"have not begun",
        frames.PREFACE + frames.frame(frames.HEADERS, 0, 1) + frames.frame(frames.DATA, 0, 1): b"are interrupted",
        frames.PREFACE + frames.frame(frames.HEADERS, frames.END_HEADERS, 2): b"an old number",
        frames.PREFACE + frames.frame(frames.SETTINGS, frames.ACK, 0): b"acknowledged",
        frames.PREFACE + b"\xff\xff\xff\0\0\0\0\0\1": b"a frame has",
        frames.PREFACE + frames.frame(frames.DATA, frames.PADDED, 1, b"\5a"): b"padding",
    }

    async def talking(door: Door, connect: Any) -> list[bytes]:
        answers = []
        for sent in cases:
            reader, writer = await connect()
            writer.write(sent)
            answers.append(await reader.read())
        return answers

    for answer, wanted in zip(talk(GrpcClient, talking), cases.values(), strict=True):
        assert wanted in answer and bool(answer) == bool(wanted)


def test_a_connection_that_has_ended_leaves_the_one_with_its_number_alone() -> None:
    """A later connection may have the descriptor of one that is gone, and is told to pause."""

    async def talking(door: Door, connect: Any) -> bytes:
        _, writer = await connect()
        await settle(lambda: bool(door._connections))
        (gone,) = door._connections
        writer.close()
        await settle(lambda: not door._connections)
        reader, writer = await connect()
        await settle(lambda: bool(door._connections))
        (client,) = door._connections
        gone.reading._file = client.reading._file  # the kernel gives the lowest number that is free
        gone.reading.pause()
        gone.reading.stop()
        writer.write(b"no HTTP\r\n\r\n")
        return await asyncio.wait_for(reader.read(), 20)

    assert talk(HttpClient, talking).startswith(b"HTTP/1.1 400")
