"""How long the guard waits for what a client sends, and how many connections it holds; no server stands behind it."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
import zlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from tritonclient.grpc.service_pb2 import ModelInferRequest

from deployment.guard import doors, events, frames, pace
from deployment.guard.checks import Checks
from deployment.guard.doors import Client, Door
from deployment.guard.grpc_door import GrpcClient
from deployment.guard.http_door import HttpClient
from deployment.guard.limits import Memory

Talk = Callable[[Door, Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]], Awaitable[Any]]


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


def talk(make: Callable[[Door], Client], talking: Talk, most_bytes: int = 1000, serve: Serve = say_nothing) -> Any:
    """Open a door, with silence behind it unless there is a server, and let a client talk to it."""

    async def run() -> Any:
        loop = asyncio.get_running_loop()
        silent = await asyncio.start_server(serve, "127.0.0.1", 0)
        door = Door(silent.sockets[0].getsockname()[:2], most_bytes, Memory(4 * most_bytes), Checks())
        server = await loop.create_server(lambda: make(door), "127.0.0.1", 0)
        address = server.sockets[0].getsockname()[:2]
        return await talking(door, partial(asyncio.open_connection, *address))

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
    update, ping = frames.window_update(1, 9), frames.frame(frames.PING, 0, 0, bytes(8))
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
        gone.reading.pause(events.Why.PACE)
        gone.reading.stop()
        writer.write(b"no HTTP\r\n\r\n")
        return await asyncio.wait_for(reader.read(), 20)

    assert talk(HttpClient, talking).startswith(b"HTTP/1.1 400")


async def answer_heads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)


@pytest.mark.parametrize("hangs_up", [False, True])
def test_a_client_that_sends_nothing_more_is_answered_and_then_keeps_no_connection(hangs_up: bool) -> None:
    async def talking(door: Door, connect: Any) -> bytes:
        reader, writer = await connect()
        writer.write(2 * b"GET /v2/health/live HTTP/1.1\r\nHost: t\r\n\r\n")
        if hangs_up:
            writer.close()
        else:
            writer.write_eof()
        answers: bytes = b"" if hangs_up else await reader.read()
        await settle(lambda: not len(door))
        return answers

    assert talk(HttpClient, talking, serve=answer_heads) == (b"" if hangs_up else 2 * ANSWER)


def test_a_refusal_that_its_client_does_not_wait_for_is_no_error() -> None:
    async def talking(door: Door, connect: Any) -> list[object]:
        problems: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        for _ in range(5):
            _, writer = await connect()
            writer.write(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nbad")
            writer.close()
            await settle(lambda: bool(len(door)))
            await settle(lambda: not len(door))
        gc.collect()  # a task that failed says so when it goes
        return problems

    assert talk(HttpClient, talking) == []


def test_who_reads_no_answers_gets_few_of_them_until_it_reads() -> None:
    count, taken = 200, []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            taken.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12000\r\n\r\n" + bytes(12000))

    async def talking(door: Door, connect: Any) -> tuple[int, int]:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(connect.args)
            client.setblocking(False)
            client.sendall(b"GET /v2 HTTP/1.1\r\nHost: t\r\n\r\n" * count)
            seen = -1
            while seen < len(taken):
                seen = len(taken)
                await asyncio.sleep(0.3)
            got = 0
            while got < count * 12000:
                got += len(await asyncio.get_running_loop().sock_recv(client, 1 << 20))
        return seen, len(taken)

    seen, all_taken = talk(HttpClient, talking, serve=serve)
    assert 0 < seen < 20 and all_taken == count


OPENED = frames.PREFACE + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, b"\x83")


@pytest.mark.parametrize(
    ("make", "first"),
    [(HttpClient, HEAD), (HttpClient, HEAD + b"Content-Length: 9\r\n\r\n["), (HttpClient, b"BAD\r\n\r\n")]
    + [
        (GrpcClient, begun)
        for begun in (frames.PREFACE + b"\0", OPENED, OPENED + frames.frame(frames.DATA, 0, 1, b"\0"))
    ],
)
def test_who_waits_for_no_answer_gives_way(
    make: Callable[[Door], Client], first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "_MOST_CONNECTIONS", 2)

    async def talking(door: Door, connect: Any) -> tuple[bool, bool]:
        pairs, clients = [], []
        for _ in range(4):
            pairs.append(await connect())
            pairs[-1][1].write(first)
            await asyncio.sleep(0.1)
            clients.append(list(door._connections)[-1])
        return clients[0].transport.is_closing(), list(door._connections) == clients[2:]

    assert talk(make, talking) == (True, True)


def test_an_address_with_most_of_the_connections_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_MOST_CONNECTIONS", 3)

    async def talking(door: Door, connect: Any) -> list[object]:
        pairs = []
        for number in (1, 2, 2, 2, 1):
            pairs.append(await connect(local_addr=(f"127.0.0.{number}", 0)))
            pairs[-1][1].write(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
            await asyncio.sleep(0.1)
        return [each.address for each in door._connections]

    assert talk(HttpClient, talking) == ["127.0.0.1", "127.0.0.2", "127.0.0.1"]


def test_a_call_that_has_a_message_gives_way_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_MOST_CONNECTIONS", 1)

    async def talking(door: Door, connect: Any) -> tuple[bytes, bool]:
        kept, writer = await connect()
        writer.write(OPENED + frames.frame(frames.DATA, 0, 1, b"\0\0\0\0\0"))
        await settle(lambda: any(client.awaits_answer for client in door._connections))
        refused, _ = await connect()
        return await refused.read(), kept.at_eof()

    assert talk(GrpcClient, talking) == (b"", False)


@pytest.mark.parametrize(
    "flood",
    [
        frames.frame(frames.PING, 0, 0, bytes(8)) * 900,
        frames.frame(frames.DATA, 0, 1) * 8000,
        frames.frame(frames.DATA, 0, 1, bytes(5) * 1000) * 3,
        frames.frame(2, 0, 1, bytes(5)) * 8000,
        frames.frame(frames.SETTINGS, 0, 0, bytes(6) * 2700) * 5,
    ],
)
def test_who_sends_very_many_frames_is_read_in_small_parts_and_later(
    flood: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "_MOST_PER_S", 5000)  # fewer than are handled, however busy the machine is

    async def talking(door: Door, connect: Any) -> tuple[int, bool]:
        _, writer = await connect()
        writer.write(OPENED + flood)
        await settle(lambda: any(client.triton and client._last_stream for client in door._connections))  # type: ignore[attr-defined]
        (client,) = door._connections
        await settle(lambda: bool(client.reading._paused & events.Why.PACE))
        small = client.reading.most
        await settle(lambda: not client.reading._paused & events.Why.PACE)
        return small, door.memory.used == 0

    assert talk(GrpcClient, talking, 1 << 20) == (2048, True)


def test_headers_without_an_end_are_ended() -> None:
    begun = frames.PREFACE + frames.frame(frames.HEADERS, 0, 1, b"\x83")

    async def talking(door: Door, connect: Any) -> tuple[bool, bool, bytes]:
        _, writer = await connect()
        writer.write(begun)
        await settle(lambda: any(client.is_coming for client in door._connections))
        (client,) = door._connections
        now = time.monotonic()
        early, late = client.is_late(now + 29), client.is_late(now + 31)
        reader, writer = await connect()
        writer.write(begun + frames.frame(frames.CONTINUATION, 0, 1) * 100)
        return early, late, await reader.read()

    early, late, answer = talk(GrpcClient, talking)
    assert (early, late) == (False, True) and b"too many headers" in answer


def test_a_client_whose_frames_come_in_parts_all_the_time_is_not_late() -> None:
    ping = frames.frame(frames.PING, 0, 0, bytes(8))

    async def talking(door: Door, connect: Any) -> bool:
        _, writer = await connect()
        writer.write(OPENED + ping[:9])
        await settle(lambda: any(client.is_coming for client in door._connections))
        (client,) = door._connections
        began = client.since
        writer.write(ping[9:] + ping[:9])
        await settle(lambda: client.since > began)
        return client.is_coming

    assert talk(GrpcClient, talking)


def test_a_connection_that_was_used_may_be_idle_for_longer() -> None:
    closed = frames.frame(frames.RST_STREAM, 0, 1, bytes(4))

    async def talking(door: Door, connect: Any) -> list[bool]:
        late = []
        for sent in (frames.PREFACE, OPENED + closed):
            _, writer = await connect()
            writer.write(sent)
            await asyncio.sleep(0.2)
            client = list(door._connections)[-1]
            late += [client.is_idle, client.is_late(time.monotonic() + 100), client.is_late(time.monotonic() + 1000)]
        return late

    assert talk(GrpcClient, talking) == [True, True, True, True, False, True]


def test_what_triton_does_not_take_counts_as_held(monkeypatch: pytest.MonkeyPatch) -> None:
    body = bytes(20 << 20)

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await taking.wait()
        await reader.readexactly(len(body))
        writer.write(ANSWER)
        await asyncio.sleep(10)

    taking = asyncio.Event()

    async def talking(door: Door, connect: Any) -> tuple[int, bytes]:
        reader, writer = await connect()
        writer.write(HEAD + b"Inference-Header-Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        await settle(lambda: any(client.triton and client.triton.is_full for client in door._connections))
        held = door.memory.used
        taking.set()
        answer = await reader.readexactly(len(ANSWER))
        await settle(lambda: door.memory.used == 0)
        return held, answer

    assert talk(HttpClient, talking, 32 << 20, wait) == (len(body), ANSWER)


def test_who_reads_nothing_of_an_answer_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()

    async def talking(door: Door, connect: Any) -> list[bool]:
        _, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n")
        await settle(lambda: any(client.transport.get_write_buffer_size() for client in door._connections))
        await asyncio.sleep(0.2)
        (client,) = door._connections
        now = time.monotonic()
        leaves = [client.leaves_unread(now + more) for more in (0, 110, 130)]
        monkeypatch.setattr(doors, "_UNREAD_S", 0.1)
        watching = asyncio.ensure_future(door.watch())
        await settle(lambda: not len(door))
        watching.cancel()
        return leaves

    assert talk(HttpClient, talking, serve=talk_on) == [False, False, True]


def test_json_that_is_too_long_is_refused_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[object] = []
    monkeypatch.setattr(Checks, "parse", lambda _, check: parsed.append(check))
    content = zlib.compress(bytes(9 << 20))

    async def talking(door: Door, connect: Any) -> bytes:
        reader, writer = await connect()
        writer.write(HEAD + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        answer: bytes = await reader.readline()
        return answer

    assert talk(HttpClient, talking, 32 << 20) == b"HTTP/1.1 413 Request Entity Too Large\r\n"
    assert not parsed
