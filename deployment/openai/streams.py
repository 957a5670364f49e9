"""gRPC streams to Triton: one request at a time in each; a stream whose request is complete serves the next one.

A new stream costs a request some tenths of a millisecond before its first token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as messages

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_TRUE_STATUS = (("triton_grpc_error", "true"),)
"""Header with which Triton ends a stream that fails with gRPC's status of the failure, in place of a text alone."""
_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
_MOST_IDLE = 256
_IDLE_S = 2.0
"""How long a stream waits for its next request; a server that is asked to stop may wait for open streams."""
_FINAL = "triton_final_response"
_ASKS_FOR_FINAL = "triton_enable_empty_final_response"


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
        call, is_complete = await self._send(request), False
        is_kept = self._says_final
        try:
            if not is_kept:  # an old server's stream ends after what has been sent, and says it in no other way
                await call.done_writing()
            while (message := await call.read()) is not grpc.aio.EOF:
                parameters = message.infer_response.parameters
                is_last = _FINAL in parameters and parameters[_FINAL].bool_param
                self._says_final = self._says_final or _FINAL in parameters
                is_complete = is_kept and is_last
                yield message
                if is_complete:
                    return
        finally:
            if is_complete and len(self._idle) < _MOST_IDLE:
                self._idle[call] = asyncio.get_running_loop().call_later(_IDLE_S, self._end, call)
            else:
                call.cancel()

    async def _send(self, request: Any) -> Any:
        """Send a request in a stream that waits, or in a new one."""
        while self._idle:
            call, timer = self._idle.popitem()
            timer.cancel()
            try:
                await call.write(request)
                return call
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the server has ended it meanwhile
                call.cancel()
        call = self._open(metadata=_TRUE_STATUS)
        try:
            await call.write(request)
        except BaseException:  # a client that hangs up now: gRPC would keep a call whose beginning was cancelled
            call.cancel()
            raise
        return call

    def _end(self, call: Any) -> None:
        """Let a stream that waits go."""
        self._idle.pop(call).cancel()
        call.cancel()
