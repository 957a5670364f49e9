"""A request that was sent to the drop-in engine's socket, and its answers, as far as its client keeps up."""

from __future__ import annotations

import asyncio
from collections import deque
from enum import Enum, auto

from deployment.openai.engine.outputs import ArrayOutputs, Outputs, Reader, TokenOutputs
from ft_format.socket_messages import CLOSING, Frame, Kind, unpack, unpack_tokens

_GONE = "the engine's process has gone"
_LAST = (Kind.LAST_TOKENS, Kind.LAST_ARRAYS, Kind.FAILURE)
_WHOLE = (Kind.ARRAYS, Kind.LAST_ARRAYS)
"""Answers that have all tokens so far."""
_MOST_WAITING = 8
"""Of them a slow client leaves waiting; the next one takes the place of all."""


class DirectError(Exception):
    """The engine refused a request, failed on it, or is gone.

    Args:
        problem: in the engine's words.
        code: a name of pb_utils.TritonError.
    """

    def __init__(self, problem: str, code: str) -> None:
        super().__init__(problem)
        self.problem, self.code = problem, code


class ClosingError(DirectError):
    """The model is unloaded or its process has gone before any answer: the request can be sent another way."""


class _Wake(Enum):
    """Why who waits for the answers of a request is woken."""

    BEHIND = auto()  # the client is, and more answers wait
    OVER = auto()  # all answers are read, or one has failed


class Exchange:
    """A request that was sent, and its answers."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._waiting: deque[Frame] = deque()  # while the client is behind
        self._wake: asyncio.Future[_Wake] = asyncio.get_running_loop().create_future()
        self._has_begun = self._is_lost = False
        self._failure: Exception | None = None
        self.is_complete = False

    async def wait(self) -> None:
        """Wait until all answers are read, or the reader has enough; raises what has gone wrong."""
        while await self._wake is _Wake.BEHIND:
            await self._reader.catch_up()
            self._wake = asyncio.get_running_loop().create_future()
            self._read_on()
        if self._failure is not None:
            raise self._failure

    def put(self, given: Frame) -> None:
        """Take a message of the engine."""
        if given.kind in _WHOLE and len(self._waiting) >= _MOST_WAITING:
            self._waiting.clear()
        self._waiting.append(given)
        self._read_on()

    def lose(self) -> None:
        """Note that no more messages come: the engine has gone."""
        self._is_lost = True
        self._read_on()

    def _read_on(self) -> None:
        """Hand the reader what waits, as far as its client keeps up."""
        while self._waiting and not self._wake.done():
            given = self._waiting.popleft()
            self._has_begun, self.is_complete = True, given.kind in _LAST
            try:
                is_behind = self._reader.take(_read(given))
            except Exception as error:  # is raised where the request was sent
                self._failure, is_behind = error, False
            is_over = self.is_complete or self._failure is not None or self._reader.has_enough
            if is_over or is_behind:
                self._wake.set_result(_Wake.OVER if is_over else _Wake.BEHIND)
        if self._is_lost and not self._wake.done():
            self._failure = DirectError(_GONE, "UNAVAILABLE") if self._has_begun else lost()
            self._wake.set_result(_Wake.OVER)


def lost() -> ClosingError:
    """Return the error of a request that the engine has not begun to answer."""
    return ClosingError(_GONE, "UNAVAILABLE")


def _read(given: Frame) -> Outputs:
    """Read an answer; DirectError: it says that the request failed."""
    if given.kind in (Kind.TOKENS, Kind.LAST_TOKENS):
        return TokenOutputs(unpack_tokens(given.body))
    _, arrays = unpack(not_failed(given).body)
    return ArrayOutputs(arrays)


def not_failed(given: Frame) -> Frame:
    """Return an answer; DirectError: it says that the request failed."""
    if given.kind == Kind.FAILURE:
        fields, _ = unpack(given.body)
        raise (ClosingError if fields["code"] == CLOSING else DirectError)(fields["problem"], fields["code"])
    return given
