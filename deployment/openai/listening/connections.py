"""Connections of clients: how many there may be, how long they may do nothing, and what they get who send no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator
from typing import Any

from aiohttp import web
from aiohttp.http import HttpVersion11

from deployment.openai.errors import ApiError
from deployment.openai.service import RECORD

FIRST_REQUEST_S = 15.0
"""From a connection's begin until the headers of its first request are there."""
IDLE_S = 75.0
"""Between an answer and the headers of the next request; longer than proxies keep theirs, which is 60 s as a rule."""
_UNREAD_S = 120.0
"""How long a client may leave unread what it was sent."""
_MOST = 4096
_RESERVED_FILES = 24
"""For text processes, and the server's and the engine's connections."""
ACCEPTED_AT_ONCE = 16
"""Connections that the event loop accepts before it does anything else; what is too many is closed in between."""
_AFTER_EOF_S = 0.05
_POLL_S = 0.05
_CLOSE_WAIT = 8
"""Linux's number of the state of a connection that the other side alone has closed."""
_LOG = logging.getLogger(__name__)


class Connection(web.RequestHandler):
    """One connection.

    Attributes:
        request: that is being answered; None: there is none.
        task: that answers it.
        has_asked: whether there was one.
        idle_since: its begin, or the end of the last answer; of the event loop's clock.
    """

    def __init__(
        self, manager: web.Server, others: Connections, *, loop: asyncio.AbstractEventLoop, is_surplus: bool
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=IDLE_S,
            auto_decompress=False,  # what is small may become gigabytes; reading.py sees to it
        )
        self._others = others
        self.request: web.Request | None = None
        self.task: asyncio.Task[Any] | None = None
        self.has_asked = False
        self.idle_since = loop.time()
        self._is_surplus, self._own_loop = is_surplus, loop
        self._unread, self._unread_since = 0, 0.0

    @contextlib.contextmanager
    def answering(self, request: web.Request) -> Iterator[None]:
        """Note that a request is being answered."""
        self.request, self.has_asked, self.task = request, True, asyncio.current_task()
        self._others.note(self, is_open=True)
        try:
            yield
        finally:
            self.request, self.idle_since = None, self._own_loop.time()
            self._others.note(self, is_open=self.transport is not None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, unless there are too many; called by the event loop."""
        super().connection_made(transport)
        self._others.note(self, is_open=True)
        if self._is_surplus:
            self.drop()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End; called by the event loop."""
        self._others.note(self, is_open=False)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close it, whatever it is doing."""
        self._others.note(self, is_open=False)
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()

    def is_overdue(self, now: float) -> bool:
        """Whether the client has had the time for its next request, or for reading what it was sent."""
        if self.transport is None:
            return False
        unread = self.transport.get_write_buffer_size()
        if unread:
            if unread != self._unread:
                self._unread, self._unread_since = unread, now
            return now - self._unread_since > _UNREAD_S
        self._unread = 0
        return self.request is None and now - self.idle_since > (IDLE_S if self.has_asked else FIRST_REQUEST_S)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what cannot be read as a request; neither the log nor the answer quotes it. Called by aiohttp."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        _LOG.warning("a request was refused, for it is not HTTP (%s)", type(exc).__name__)
        error = ApiError("the request is not HTTP/1.1 that can be read", "see RFC 9112", status=status)
        response = web.json_response(error.body, status=status)
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log that a connection has failed, without what was sent; called by aiohttp."""
        _LOG.error("a connection has failed (%s)", type(kw.get("exc_info")).__name__)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Find out whether the client has gone, or only sends nothing more; called by the event loop."""
        if self.transport is None:
            return None
        self._own_loop.call_soon(self._look_after_eof, True)
        return True

    def _look_after_eof(self, is_first: bool) -> None:
        """Close the connection once nothing is left to be answered, or its client has gone.

        Both look the same at first. An interim response, which every client of HTTP/1.1 must be able to read, tells:
        the kernel of one that has gone refuses it.
        """
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        if self.request is None:
            if self._own_loop.time() - self.idle_since > _AFTER_EOF_S and not is_first:
                transport.close()
                return
        elif self.request.version < HttpVersion11 or not _is_half_open(transport):
            self.drop()
            return
        elif not self.request[RECORD].has_begun:
            self.request[RECORD].has_begun = True  # once is enough
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._own_loop.call_later(_AFTER_EOF_S / 5, self._look_after_eof, False)


def _is_half_open(transport: asyncio.BaseTransport) -> bool:
    """Whether the other side has closed its direction alone, as far as is known."""
    try:
        state: int = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    except OSError:
        return False
    return state == _CLOSE_WAIT


class Connections:
    """The connections of a server: makes them, and closes those that do nothing.

    Args:
        server: of aiohttp.
        most_requests: at a time; there may be as many connections at least.
    """

    def __init__(self, server: web.Server, most_requests: int) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        in_use = len(os.listdir("/proc/self/fd")) + _RESERVED_FILES + 2 * ACCEPTED_AT_ONCE
        self._most = max(1, min(max(_MOST, 2 * most_requests), _open_files() - in_use))
        self._open: set[Connection] = set()
        self._silent: dict[Connection, None] = {}  # those that have never asked, and those that wait after an answer:
        self._idle: dict[Connection, None] = {}  # the oldest first

    def __call__(self) -> Connection:
        """Make a connection; called by the event loop."""
        is_surplus = False
        if len(self._open) >= self._most:
            oldest = next(iter(self._silent), None) or next(iter(self._idle), None)
            is_surplus = oldest is None
            if oldest is not None:
                oldest.drop()
        return Connection(self._server, self, loop=self._loop, is_surplus=is_surplus)

    def note(self, connection: Connection, is_open: bool) -> None:
        """Note what a connection has begun to do."""
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)
        if not is_open:
            self._open.discard(connection)
            return
        self._open.add(connection)
        if connection.request is None:
            (self._idle if connection.has_asked else self._silent)[connection] = None

    async def end(self, timeout_s: float) -> None:
        """Take no more requests, and cut those off that are not answered within some seconds."""
        self._server.pre_shutdown()
        deadline = self._loop.time() + timeout_s
        while any(each.request for each in self._open) and self._loop.time() < deadline:
            await asyncio.sleep(_POLL_S)
        tasks = {each.task for each in self._open if each.request and each.task}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_POLL_S * 10)

    async def sweep(self) -> None:
        """Close connections that are overdue, for ever."""
        while True:
            await asyncio.sleep(1)
            now = self._loop.time()
            for each in tuple(self._open):
                if each.is_overdue(now):
                    each.drop()


def _open_files() -> int:
    """Allow this process all the files that it may have, and return their number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * _MOST if hard == resource.RLIM_INFINITY else min(hard, max(soft, 4 * _MOST))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
