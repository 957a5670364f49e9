"""Answers on their way from whoever reads them off a connection to whoever waits for them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


def settle(future: asyncio.Future[None] | None) -> None:
    """Wake whoever waits for a future."""
    if future is not None and not future.done():
        future.set_result(None)


class Mailbox(Generic[T]):
    """Messages in their order; of one event loop, with one reader."""

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        self._is_over = False
        self._error: Exception | None = None
        self._news: asyncio.Future[None] | None = None

    async def take(self) -> T | None:
        """Wait for the next message; None: there are no more. Raises what ``end`` was given."""
        while not self._messages:
            if self._error is not None:
                raise self._error
            if self._is_over:
                return None
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        return self._messages.popleft()

    def put(self, message: T) -> None:
        """Leave a message."""
        self._messages.append(message)
        settle(self._news)

    def clear(self) -> None:
        """Drop the messages that were not taken."""
        self._messages.clear()

    def end(self, error: Exception | None = None) -> None:
        """Note that no more messages come, and why."""
        self._is_over, self._error = True, error
        settle(self._news)

    @property
    def is_over(self) -> bool:
        """Whether no more messages come."""
        return self._is_over

    def __len__(self) -> int:
        """Messages that were not taken."""
        return len(self._messages)
