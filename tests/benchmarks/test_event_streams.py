"""The benchmark's client of server-sent events, against a server whose stream comes in pieces of any size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from benchmarks.serving.event_streams import Target, through_events
from benchmarks.serving.token_overhead import Arrivals
from handover.errors import ServerError

TOKENS, WAIT_S = 4, 0.02
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"data: [DONE]\n\n"


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


async def arrivals_from(pieces: Sequence[bytes], bodies: list[dict[str, object]]) -> list[Arrivals]:
    """Ask a server twice that sends these pieces, one every 20 ms; two clients the second time."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
            bodies.append(json.loads(await reader.readexactly(length)))
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(WAIT_S)

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    ask = through_events(Target(f"http://127.0.0.1:{port}", "m", (5, 6), TOKENS))
    found = await ask(1) + await ask(2)
    server.close()
    return found


def test_each_event_has_its_time_however_the_bytes_are_cut() -> None:
    events = [chunk(b"data: " + json.dumps({"text": "a" * number}).encode() + b"\n\n") for number in range(TOKENS)]
    bodies: list[dict[str, object]] = []
    pieces = [
        HEAD + events[0][:8],
        events[0][8:] + events[1],
        *events[2:],
        chunk(END)[:9],
        chunk(END)[9:] + b"0\r\n\r\n",
    ]
    found = asyncio.run(arrivals_from(pieces, bodies))
    assert [len(each.chunk_ns) for each in found] == [3, 3, 3] and {each.tokens for each in found} == {TOKENS}
    for each in found:
        assert each.first_ms >= 1000 * WAIT_S  # the first event is complete with the second piece
        assert each.further_ms >= 1000 * 2 * WAIT_S / (TOKENS - 1) * 0.9
    assert [(body["prompt"], body["max_tokens"], body["stream"]) for body in bodies] == [([5, 6], TOKENS, True)] * 3


def test_a_refusal_is_an_error() -> None:
    with pytest.raises(ServerError, match="no such model"):
        asyncio.run(arrivals_from([b"HTTP/1.1 404 Not Found\r\n\r\nno such model"], []))
