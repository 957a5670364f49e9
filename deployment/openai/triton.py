"""Ask a Triton server over gRPC, in streams: one request each, answered token by token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import InferenceServerException, InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc import aio as triton
from tritonclient.utils import np_to_triton_dtype

from deployment.openai.errors import ApiError
from handover.errors import ServerError

Tensors = Mapping[str, npt.NDArray[Any]]

_PATIENCE_S = 60.0
_TRUE_STATUS = {"triton_grpc_error": "true"}
"""Header with which Triton ends a stream that fails with gRPC's status of the failure, in place of a text alone."""
_STATUS = {"INVALID_ARGUMENT": 400, "UNAVAILABLE": 503, "NOT_FOUND": 503, "RESOURCE_EXHAUSTED": 503}


class Triton:
    """A connection to a server; of one event loop.

    Args:
        url: ``host:port`` of gRPC.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = triton.InferenceServerClient(url)

    async def close(self) -> None:
        """Close the connection."""
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

    async def ask(
        self, model: str, tensors: Tensors, outputs: Sequence[str], request_id: str
    ) -> AsyncGenerator[InferResult, None]:
        """Send one request and yield its answers; the request is cancelled when the caller stops reading early.

        Args:
            model: Triton's name of the model.
            tensors: inputs by name.
            outputs: names of what is to be answered.
            request_id: for the server's log.

        Raises:
            ApiError: the server refused the request, failed on it, or is gone.
        """
        request = {
            "model_name": model,
            "inputs": [_input(name, array) for name, array in tensors.items()],
            "outputs": [InferRequestedOutput(name) for name in outputs],
            "request_id": request_id,
        }
        answers = self._client.stream_infer(_once(request), headers=_TRUE_STATUS)
        try:
            async for answer, error in answers:
                if error is not None:
                    raise _worded(error.message(), "INVALID_ARGUMENT")
                if answer.get_response().outputs:
                    yield answer
        except grpc.aio.AioRpcError as error:
            raise _worded(error.details() or "", error.code().name) from error
        finally:
            answers.cancel()

    async def _is_live(self) -> bool:
        try:
            return bool(await self._client.is_server_live(client_timeout=_PATIENCE_S))
        except InferenceServerException:
            return False


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _input(name: str, array: npt.NDArray[Any]) -> InferInput:
    tensor = InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(np.ascontiguousarray(array))
    return tensor


def _worded(message: str, code: str) -> ApiError:
    """Word what Triton says for a client; its own failures and a server that is gone are no fault of the request."""
    status = _STATUS.get(code, 500)
    hint = "" if status == 400 else "see the server's log; the same request may succeed when it serves again"
    return ApiError(f"the model refused the request: {message}" if status == 400 else message, hint, status=status)
