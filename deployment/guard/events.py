"""The event loop: what comes over the guard's connections is read and handled in the wake-up that it causes.

asyncio makes a call of each event and runs it in a later part of its turn, which takes longer than most requests need
here. So its selector, which only waits, also reads: the sockets of connections are in a set of their own. Connecting,
sending and closing stay asyncio's. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import selectors
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from enum import IntFlag
from typing import Any, TypeVar

READ_BYTES = 64 << 10
"""At a time. For more the C library may map new memory at every read, which takes up to 30 us."""
_MOST_EVENTS = 64
R = TypeVar("R")


class Why(IntFlag):
    """Reasons to leave unread what comes, each of which may end before another."""

    AHEAD = 1
    """What has come is not handled yet."""
    OTHER_SIDE = 2
    """It takes nothing more."""
    PACE = 4
    """So much has come that others would wait."""


class Poll(selectors.EpollSelector):
    """A selector for asyncio that calls the readers of some sockets itself.

    Attributes:
        is_awaited: asyncio has got something to do, and select returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = False
        self._readers: dict[int, Callable[[], None]] = {}
        self._all = select.epoll()
        self._all.register(self.fileno(), select.EPOLLIN)  # what asyncio waits for is one more of them

    def add(self, file: int, read: Callable[[], None]) -> None:
        """Call a reader as long as there is something to read, an end or an error included."""
        self._readers[file] = read
        self._all.register(file, select.EPOLLIN)

    def remove(self, file: int) -> None:
        """Forget a socket's reader, if it has one."""
        if self._readers.pop(file, None) is not None:
            self._all.unregister(file)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait and read, again and again, until the time has passed or there is something for asyncio to do."""
        deadline = None if timeout is None else time.monotonic() + timeout
        poll, readers = self._all.poll, self._readers
        self.is_awaited = False
        while True:
            for file, _ in poll(timeout, _MOST_EVENTS):
                if file in readers:
                    readers[file]()
                else:
                    self.is_awaited = True
            if self.is_awaited:
                return super().select(0)
            if deadline is not None and (timeout := deadline - time.monotonic()) <= 0:
                return []

    def close(self) -> None:
        """Release both sets."""
        self._all.close()
        super().close()


class Loop(asyncio.SelectorEventLoop):
    """asyncio's loop with such a selector."""

    def __init__(self) -> None:
        self.poll = Poll()
        super().__init__(self.poll)

    def call_soon(  # type: ignore[override]  # typeshed's says each argument's type, which Python 3.10 cannot
        self,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Have a function called in the loop's next turn, which then begins at once."""
        self.poll.is_awaited = True
        return super().call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]  # as above
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Have a function called at a time that the selector did not know of when it began to wait."""
        self.poll.is_awaited = True
        return super().call_at(when, callback, *args, context=context)


class Reading:
    """Reads for a protocol in asyncio's place.

    Args:
        transport: that the protocol has just been given.
        receive: takes what was read.
        end: takes the end; whether the transport stays open for sending.

    Attributes:
        most: bytes at a time.
    """

    def __init__(self, transport: Any, receive: Callable[[bytes], None], end: Callable[[], bool | None]) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        self._loop, self._transport, self._receive, self._end = loop, transport, receive, end
        self._file = transport.get_extra_info("socket").fileno()
        self.most = READ_BYTES
        self._is_over = self._has_begun = False
        self._paused = 0
        loop.call_soon(self._begin)  # asyncio would begin to read only after this turn

    def _begin(self) -> None:
        self._transport.pause_reading()
        self._has_begun = True
        if not self._paused and not self._is_over:
            self._loop.poll.add(self._file, self._read)

    def pause(self, why: Why) -> None:
        """Leave what comes where it is."""
        self._paused |= why
        self._forget()

    def resume(self, why: Why) -> None:
        """Go on, unless there is another reason not to."""
        if self._paused == why and self._has_begun and not self._is_over:
            self._loop.poll.add(self._file, self._read)
        self._paused &= ~why

    def stop(self) -> None:
        """Read no more: the socket is closed, or will be."""
        self._forget()
        self._is_over = True

    def _forget(self) -> None:
        if not self._is_over:  # else its number may be another connection's by now
            self._loop.poll.remove(self._file)

    def _read(self) -> None:
        if self._transport.is_closing():
            self.stop()
            return
        try:
            data = os.read(self._file, self.most)
        except BlockingIOError:
            return
        except OSError:
            data = None
        try:
            if data:
                self._receive(data)
                return
            self.stop()
            if data is None:
                self._transport.abort()
            elif not self._end():
                self._transport.close()
        except Exception as error:
            self.stop()
            context = {"message": "a connection's data could not be handled", "exception": error}
            self._loop.call_exception_handler(context)
            self._transport.abort()


def run(main: Coroutine[Any, Any, R]) -> R:
    """Run to its end what opens the guard's doors, as ``asyncio.run`` does."""
    loop = Loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(main)
    finally:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        with contextlib.suppress(RuntimeError):
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()
