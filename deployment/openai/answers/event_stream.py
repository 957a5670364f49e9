"""A response of server-sent events whose events are written at once, the first of them together with the head."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import SERVER_SOFTWARE, HttpVersion11

from deployment.openai.service import RECORD, REQUEST_ID

_MOST_UNSENT = 1 << 16
"""Bytes that wait for a slow client, from which on it is behind."""


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)


class EventStream(web.StreamResponse):
    """The response to one request.

    aiohttp's own would send its head by itself, which wakes the client for nothing, and take a coroutine for every
    event, so that events could not be written where the engine's answers are read.
    """

    def __init__(self, request: web.Request) -> None:
        super().__init__()
        self._client = request
        self._is_chunked = request.version >= HttpVersion11  # else the connection's end is the stream's
        self._head = self._held = b""
        self.has_begun = self._has_ended = False

    def get_ready(self) -> None:
        """Write the head, which is sent with the first event."""
        version = self._client.version
        lines = [
            f"HTTP/{version.major}.{version.minor} 200 OK",
            "Content-Type: text/event-stream; charset=utf-8",
            "Cache-Control: no-cache",
            *(["Transfer-Encoding: chunked"] if self._is_chunked else []),
            f"Date: {_date(int(time.time()))}",
            f"Server: {SERVER_SOFTWARE}",
            *(["Connection: close"] if self._is_chunked and not self.keep_alive else []),
            f"{REQUEST_ID}: {self._client[RECORD].id}",
        ]
        self._head = "\r\n".join([*lines, "", ""]).encode()

    def send(self, events: bytes) -> bool:
        """Send events; returns whether the client is far behind.

        Raises:
            ConnectionResetError: the client has gone.
        """
        return self._write(b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events)

    def hold(self, events: bytes) -> None:
        """Send events together with those that the response ends with, which follow at once."""
        self._held += events

    def cut(self, events: bytes) -> None:
        """Send the last events of a response that is not complete."""
        self._end(events)

    async def catch_up(self) -> None:
        """Wait until the client is no more behind."""
        await self._client.writer.drain()

    def _write(self, data: bytes) -> bool:
        transport = self._client.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has gone")
        if not self.has_begun:
            data, self.has_begun = self._head + data, True
            self._client[RECORD].has_begun = True
        transport.write(data)
        return transport.get_write_buffer_size() > _MOST_UNSENT

    @property
    def keep_alive(self) -> bool:
        """Whether the connection serves another request."""
        return self._is_chunked and self._client.keep_alive

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Do nothing; called by aiohttp."""
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Send the last events, and end the response; aiohttp calls it again."""
        if self._has_ended:
            return
        self._end(data)
        await self.catch_up()

    def _end(self, data: bytes) -> None:
        self._has_ended = True
        data = self._held + data
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""  # an empty one is the end
            data = chunk + b"0\r\n\r\n"
        self._write(data)
