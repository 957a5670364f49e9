"""gRPC streams to Triton: one request at a time in each; a stream whose request is complete serves the next one.

A new stream costs a request some tenths of a millisecond before its first token.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

import grpc
from tritonclient.grpc import service_pb2 as messages

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


_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_TRUE_STATUS = (("triton_grpc_error", "true"),)
"""Header with which Triton ends a stream that fails with gRPC's status of the failure, in place of a text alone."""
_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_MOST_IDLE = 256
_IDLE_S = 2.0
"""How long a stream waits for its next request; a server that is asked to stop may wait for open streams."""
_MOST_WAITING = 8
"""Answers that are read ahead of a slow client; the server keeps the rest."""
_FINAL = "triton_final_response"
_ASKS_FOR_FINAL = "triton_enable_empty_final_response"


class Exchange(Mailbox[Any]):
    """A request's call and its answers.

    Attributes:
        call: of gRPC; None: it has not begun.
        is_sent: whether the server gets the request.
        is_given_up: whether more answers are not wanted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.call: Any = None
        self.is_sent = self.is_given_up = False
        self._room: asyncio.Future[None] | None = None

    async def take(self) -> Any:
        """Wait for the next answer; None: there are no more. Raises what the call has failed with."""
        message = await super().take()
        settle(self._room)
        return message

    def pass_on(self, message: Any) -> asyncio.Future[None] | None:
        """Leave an answer; returns what to wait for where the other side is far behind."""
        self.put(message)
        if len(self) < _MOST_WAITING or self.is_given_up:
            return None
        self._room = asyncio.get_running_loop().create_future()
        return self._room

    def give_up(self) -> None:
        """Cancel the call unless it is over."""
        self.is_given_up = True
        settle(self._room)
        if self.call is not None and not self.is_over:
            self.call.cancel()


class Streams:
    """Streams over one connection; of one event loop.

    Args:
        url: ``host:port`` of gRPC.
    """

    def __init__(self, url: str) -> None:
        self._channel = grpc.aio.insecure_channel(url, options=_OPTIONS)
        self._open = self._channel.stream_stream(
            _METHOD,
            request_serializer=messages.ModelInferRequest.SerializeToString,
            response_deserializer=messages.ModelStreamInferResponse.FromString,
        )
        self._idle: dict[Any, asyncio.TimerHandle] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._says_final = False

    async def close(self) -> None:
        """Close the connection."""
        for call in list(self._idle):
            self._end(call)
        await self._channel.close()

    async def ask(self, request: Any) -> AsyncGenerator[Any, None]:
        """Send a ModelInferRequest and yield the ModelStreamInferResponses to it, one at least without outputs.

        The request is cancelled when the caller stops reading early.

        Raises:
            AioRpcError: the server refused the request, failed on it, or is gone.
        """
        request.parameters[_ASKS_FOR_FINAL].bool_param = True
        exchange = Exchange()
        # gRPC (1.85) does not free an answer whose reader is cancelled. So the call is, and its reader sees it end.
        reader = asyncio.create_task(self._read(request, exchange))
        self._readers.add(reader)
        reader.add_done_callback(self._readers.discard)
        try:
            while (message := await exchange.take()) is not None:
                yield message
        finally:
            exchange.give_up()
            if not exchange.is_sent:  # the call may never begin then, and writing to it would never end
                reader.cancel()

    async def _read(self, request: Any, exchange: Exchange) -> None:
        """Send a request and pass its answers on; failures too."""
        try:
            await self._send(request, exchange)
            exchange.is_sent = True
            await self._pass_on(exchange)
        except Exception as error:
            exchange.end(error)
        except asyncio.CancelledError:  # the call was given up
            exchange.end()
        else:
            exchange.end()

    async def _pass_on(self, exchange: Exchange) -> None:
        call, is_complete = exchange.call, False
        is_kept = self._says_final
        try:
            if not is_kept:  # an old server's stream ends after what has been sent, and says it in no other way
                await call.done_writing()
            while not is_complete and (message := await call.read()) is not grpc.aio.EOF:
                parameters = message.infer_response.parameters
                is_last = _FINAL in parameters and parameters[_FINAL].bool_param
                self._says_final = self._says_final or _FINAL in parameters
                is_complete = is_kept and is_last
                if room := exchange.pass_on(message):
                    await room
        finally:
            if is_complete and not exchange.is_given_up and len(self._idle) < _MOST_IDLE:
                self._idle[call] = asyncio.get_running_loop().call_later(_IDLE_S, self._end, call)
            else:
                call.cancel()

    async def _send(self, request: Any, exchange: Exchange) -> None:
        """Send a request in a stream that waits, or in a new one."""
        while self._idle and not exchange.is_given_up:
            exchange.call, timer = self._idle.popitem()
            timer.cancel()
            try:
                await exchange.call.write(request)
                return
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the server has ended it meanwhile
                exchange.call.cancel()
        if exchange.is_given_up:
            raise asyncio.CancelledError
        exchange.call = self._open(metadata=_TRUE_STATUS)
        try:
            await exchange.call.write(request)
        except BaseException:  # gRPC would keep a call whose beginning has failed
            exchange.call.cancel()
            raise

    def _end(self, call: Any) -> None:
        """Release a stream that waits."""
        self._idle.pop(call).cancel()
        call.cancel()
