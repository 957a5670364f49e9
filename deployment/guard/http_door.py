"""The HTTP door: whole requests go to Triton one at a time, its responses come back as they are."""

from __future__ import annotations

import asyncio
import contextlib
import json
from http import HTTPStatus
from typing import NamedTuple

from deployment.guard.doors import Client, Door, Triton
from deployment.guard.events import Why
from deployment.guard.http_bodies import Body
from deployment.guard.http_heads import LONGEST_HEAD, RequestHead, ResponseEnd
from deployment.guard.json_bodies import check_json
from deployment.guard.limits import RefusedError

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MOST_AHEAD = 64 << 10
"""Bytes of the next request that are read while one is answered."""
_LINGER_S = 2.0
_SHORT_BODY = 4096
_PIECE = 256 << 10


class _Known(NamedTuple):
    """What is known of a request by its head, which most requests of a connection have in common.

    Attributes:
        head: as the client sends it, with the empty line.
        forwarded: the head for Triton.
        method: of the request.
        size: of the request, with its body.
    """

    head: bytes
    forwarded: bytes
    method: bytes
    size: int


class HttpClient(Client):
    """A connection to the HTTP door, or to that of the metrics, which takes no bodies."""

    def __init__(self, door: Door, takes_bodies: bool = True) -> None:
        super().__init__(door)
        self._takes_bodies = takes_bodies
        self._data = bytearray()
        self._head: RequestHead | None = None
        self._given_head = b""
        self._known: _Known | None = None
        self._body: Body | None = None
        self._waiting: tuple[bytes, bytes | bytearray] | None = None
        self._unsent: memoryview | None = None
        self._has_no_triton = self._has_sent_all = False
        self._response = ResponseEnd()
        self._checking: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        super().connection_made(transport)
        self.transport.set_write_buffer_limits(0)

    def data_received(self, data: bytes) -> None:
        """Take what the client sends."""
        if self.is_over:
            return
        self._data += data
        self.come_bytes += len(data)
        if self._is_busy:
            if len(self._data) > _MOST_AHEAD:
                self.reading.pause(Why.AHEAD)
            return
        self._go_on()

    def eof_received(self) -> bool:
        """A client that has sent everything may still be answered."""
        self._has_sent_all = True
        return self._is_busy

    @property
    def _is_busy(self) -> bool:
        """Whether the next request waits; that is also for a client that does not read what it was answered."""
        is_answered = self._response.is_over and not self.transport.get_write_buffer_size()
        return not is_answered or self._checking is not None or self._unsent is not None

    def _go_on(self) -> None:
        try:
            if self._head is None:
                if self._known and self.triton and self._data.startswith(self._known.head):
                    self._pass_alike(self._known, self.triton)
                    return
                if not self._read_head():
                    return
            head, body = self._head, self._body
            assert head is not None and body is not None
            if not body.is_whole:
                body.receive(self._data)
                if not body.is_whole:
                    return
            self.is_coming = False
            if body.is_checked_at_once(head):
                body.check(head)
                self._forward(head, body)
            else:
                self._checking = asyncio.ensure_future(self._check_slowly(head, body))
        except RefusedError as refused:
            self._refuse(refused)

    def _read_head(self) -> bool:
        if self._data and self.is_idle:
            self.begin()
        while self._data[:2] == b"\r\n":  # that some clients send after a body
            del self._data[:2]
        end = self._data.find(b"\r\n\r\n")
        if end > LONGEST_HEAD or end < 0 and len(self._data) > LONGEST_HEAD:
            raise RefusedError("the request's head is too long", 431)
        if end < 0:
            return False
        self._given_head = bytes(self._data[: end + 4])
        head = RequestHead.parse(self._given_head[:end])
        del self._data[: end + 4]
        if not self._takes_bodies and (head.is_chunked or head.body_bytes or head.method not in (b"GET", b"HEAD")):
            raise RefusedError("metrics are only read: by GET, without a body", 405)
        self._head, self._body = head, Body(head, self.door.most_bytes, self.door.memory)
        if head.values.get(b"expect", b"").lower() == b"100-continue" and not self._body.is_whole and not self._data:
            self.transport.write(_CONTINUE)
        return True

    def _pass_alike(self, known: _Known, triton: Triton) -> None:
        """Check and pass on a request whose head is known, once it is whole."""
        if self.is_idle:
            self.begin()
        if len(self._data) < known.size:
            return
        self.is_coming = False
        body = bytes(self._data[len(known.head) : known.size])
        if body:
            check_json(body)
        del self._data[: known.size]
        self._response.expect(known.method)
        triton.transport.write(known.forwarded + body)

    async def _check_slowly(self, head: RequestHead, body: Body) -> None:
        try:
            await body.check_slowly(head, self.door.checks)
        except RefusedError as refused:
            self._checking = None
            self._refuse(refused)
            return
        self._checking = None
        if not self.transport.is_closing():
            self._forward(head, body)

    def _forward(self, head: RequestHead, body: Body) -> None:
        request = head.forwarded(len(body.content), body.is_decompressed), body.content
        if head.is_plain and len(body.content) <= _SHORT_BODY:
            size = len(self._given_head) + len(body.content)
            self._known = _Known(self._given_head, request[0], head.method, size)
        self._response.expect(head.method)
        if self._has_no_triton:
            self._refuse(RefusedError("the server does not take requests at this time", 503))
        elif self.triton is None:
            self._waiting = request
        else:
            self._send(self.triton, *request)

    def _send(self, triton: Triton, head: bytes, body: bytes | bytearray) -> None:
        is_short = len(body) < _MOST_AHEAD
        triton.transport.write(head + body if is_short else head)
        self._unsent = memoryview(b"" if is_short else body)
        self.go_on_sending()

    def go_on_sending(self) -> None:
        """Write as much of the body as Triton takes."""
        if self._unsent is None or self.triton is None:
            return
        while self._unsent:
            if self.triton.is_full:
                return
            part, self._unsent = self._unsent[:_PIECE], self._unsent[_PIECE:]
            self.triton.transport.write(part)
        self._unsent = None
        if self._body is not None:
            self._body.drop()
        self._head = self._body = None
        if self._response.is_over:  # before the request was
            self._take_next()

    def connected(self, triton: Triton | None) -> None:
        """Send the request that has waited."""
        request, self._waiting = self._waiting, None
        if triton is None:
            self._has_no_triton = True
            if request is not None:
                self._refuse(RefusedError("the server does not take requests at this time", 503))
        elif request is not None:
            self._send(triton, *request)

    def answered(self, data: bytes) -> None:
        """Pass Triton's answer on."""
        self.transport.write(data)
        if self._response.is_over:
            self.close()  # no request waits for it
            return
        try:
            self._response.feed(data)
        except ValueError:
            self.close()
            return
        if self._response.is_over and self._unsent is None:
            self._take_next()

    def _take_next(self) -> None:
        """Read the next request, if there can be one."""
        if self.transport.is_closing():
            return
        self.rest()
        self.was_answered = True
        self._begin_next()

    def resume_writing(self) -> None:
        """The client has taken what it was answered."""
        super().resume_writing()
        if not self.is_over and not self.transport.is_closing():
            self._begin_next()

    def _begin_next(self) -> None:
        if self._data and not self._is_busy:
            self._go_on()
        if self.is_over or not self._is_busy:
            self.reading.resume(Why.AHEAD)
        if self._has_sent_all and not self._is_busy and not self.is_over:
            self.close()

    def give_up(self) -> None:
        """Tell the client why the connection ends, where a request is coming in."""
        if self.is_coming:
            self._refuse(RefusedError("the request took too long to come in", 408))
        else:
            self.close()

    def _refuse(self, refused: RefusedError) -> None:
        """Answer in Triton's place, and hang up: what else the client sends may be part of what was refused."""
        if self.transport.is_closing():
            return
        self.door.report(refused.problem)
        self.is_over = True
        self.rest()
        content = json.dumps({"error": refused.problem}).encode()
        status = HTTPStatus(refused.status)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        if self._body is not None:
            self._body.drop()
        self._head = self._body = None
        self._data.clear()
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has hung up, and takes not even the answer
                self.transport.write_eof()
        # A connection that is closed while a client still sends is reset, and the client may never read the answer.
        asyncio.get_running_loop().call_later(_LINGER_S, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what the client has sent."""
        super().connection_lost(exc)
        self._data.clear()  # the rest goes when Python looks for what refers to itself, which is seldom
        self._waiting = self._unsent = None
        if self._checking is not None:
            self._checking.cancel()
        if self._body is not None:
            self._body.drop()
