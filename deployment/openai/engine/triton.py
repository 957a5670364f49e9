"""Ask a Triton server over gRPC: requests that are answered token by token, and what its models are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
from tritonclient.grpc import InferenceServerException
from tritonclient.grpc import aio as triton
from tritonclient.grpc import service_pb2 as messages
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from deployment.openai.engine.asked import SequenceRequest
from deployment.openai.engine.direct import Connection, Direct
from deployment.openai.engine.exchange import ClosingError, DirectError
from deployment.openai.engine.outputs import Reader, ResponseOutputs
from deployment.openai.engine.streams import Streams
from deployment.openai.errors import ApiError
from ft_format import arrival
from ft_format.socket_messages import AdapterWish, Array, Scalar
from handover.errors import ServerError

_PATIENCE_S = 60.0
_CODES = {"INVALID_ARG": "INVALID_ARGUMENT"}
"""gRPC's names of codes that have another one in Triton's Python API."""
_STATUS = {"INVALID_ARGUMENT": 400, "UNAVAILABLE": 503, "NOT_FOUND": 503, "RESOURCE_EXHAUSTED": 503}


class Triton:
    """A connection to a server; of one event loop.

    Args:
        url: ``host:port`` of gRPC.
        sockets: directory of the drop-in engine's sockets; None: it has none on this host.
    """

    def __init__(self, url: str, sockets: Path | None = None) -> None:
        self.url = url
        self._direct = Direct(sockets)
        self._client = triton.InferenceServerClient(url)
        self._streams = Streams(url)

    async def close(self) -> None:
        """Close the connections."""
        self._direct.close()
        await self._streams.close()
        await self._client.close()

    async def config(self, model: str) -> Any:
        """Return a model's configuration; None: the server has no such model.

        Raises:
            ServerError: no server answers.
        """
        try:
            return (await self._client.get_model_config(model, client_timeout=_PATIENCE_S)).config
        except InferenceServerException as error:
            if not await self._is_live():
                raise ServerError(
                    f"no server answers at {self.url}: {error.message()}", "give another --endpoint"
                ) from error
            return None

    async def is_ready(self, models: Sequence[str]) -> bool:
        """Return whether the server and its models take requests."""
        try:
            for model in models:
                if not await self._client.is_model_ready(model, client_timeout=_PATIENCE_S):
                    return False
        except InferenceServerException:
            return False
        return True

    async def ask(self, request: SequenceRequest, reader: Reader) -> None:
        """Send one request and hand its answers over; the request is cancelled when this is, or the reader has enough.

        Where the model has a socket on this host, it is asked through that.

        Raises:
            ApiError: the server refused the request, failed on it, or is gone.
        """
        if (connection := await self._direct.connection(request.model.engine)) is not None:
            try:
                await _ask_directly(connection, request, reader)
                return
            except ClosingError:
                pass  # Triton may have another version of the model
            except DirectError as error:
                raise _worded(error.problem, _CODES.get(error.code, error.code)) from error
        await self._ask_by_grpc(request, reader)

    async def change_adapters(self, model: str, wish: AdapterWish) -> Mapping[str, Any] | None:
        """Change the adapters of all instances of a model; returns what it has then, None where it has no socket here.

        Raises:
            ApiError: it refused.
        """
        try:
            answers = [await each.change_adapters(wish) for each in await self._direct.connections(model)]
        except DirectError as error:
            raise _worded(error.problem, _CODES.get(error.code, error.code)) from error
        return answers[0] if answers else None

    async def _ask_by_grpc(self, given: SequenceRequest, reader: Reader) -> None:
        request = _request(given.model.engine, given.tensors, given.outputs, given.request_id)
        request.parameters[arrival.PARAMETER].string_param = arrival.written(given.arrived_ns)
        reader.get_ready()
        try:
            async with aclosing(self._streams.ask(request)) as answers:
                async for answer in answers:
                    if answer.error_message:
                        raise _worded(answer.error_message, "INVALID_ARGUMENT")
                    if answer.infer_response.outputs and reader.take(ResponseOutputs(answer.infer_response)):
                        await reader.catch_up()
                    if reader.has_enough:
                        return
        except grpc.aio.AioRpcError as error:
            raise _worded(error.details() or "", error.code().name) from error

    async def _is_live(self) -> bool:
        try:
            return bool(await self._client.is_server_live(client_timeout=_PATIENCE_S))
        except InferenceServerException:
            return False


async def _ask_directly(connection: Connection, given: SequenceRequest, reader: Reader) -> None:
    streamed = given.is_streamed and given.model.is_decoupled and not given.is_searched
    named = given.request_id, given.arrived_ns
    shown = None if given.is_searched else given.shown
    await connection.ask(given.tensors, given.outputs, shown, streamed, *named, reader)


def _request(model: str, tensors: Mapping[str, Array | Scalar], outputs: Sequence[str], request_id: str) -> Any:
    """Make a ModelInferRequest; the types of tritonclient would copy every tensor twice."""
    request = messages.ModelInferRequest(model_name=model, id=request_id)
    for name, given in tensors.items():
        array = given.to_array() if isinstance(given, Scalar) else given
        request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        content = serialize_byte_tensor(array).item() if array.dtype == object else array.tobytes()
        request.raw_input_contents.append(content)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def _worded(message: str, code: str) -> ApiError:
    """Word what Triton says for a client; its own failures and a server that is gone are no fault of the request."""
    status = _STATUS.get(code, 500)
    hint = "" if status == 400 else "see the server's log; the same request may succeed when it serves again"
    return ApiError(f"the model refused the request: {message}" if status == 400 else message, hint, status=status)
