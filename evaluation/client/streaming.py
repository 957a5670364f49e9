"""Requests over a gRPC stream: a decoupled model sends several answers to one request, a stateful one keeps sessions.

A model that is not decoupled accepts the same requests and sends one answer.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tritonclient import grpc as triton
from tritonclient.utils import InferenceServerException


@dataclass(frozen=True)
class Turn:
    """A request's place in a session of a stateful model.

    Attributes:
        session: id of the session; not 0 and not empty.
        is_first, is_last: whether the request starts and ends the session.
    """

    session: int | str
    is_first: bool
    is_last: bool


def stream(
    connection: triton.InferenceServerClient,
    model: str,
    inputs: Sequence[triton.InferInput],
    timeout_s: float,
    turn: Turn | None = None,
) -> Iterator[triton.InferResult]:
    """Send one request and yield its answers as they arrive.

    The request is cancelled when the caller stops reading early. A connection carries one stream at a time.

    Args:
        connection: connection to the server.
        model: Triton's name of the model.
        inputs: the request's tensors.
        timeout_s: limit until the last answer, in seconds.
        turn: the request's place in a session; None for a model without state.

    Raises:
        InferenceServerException: the server refused the request or failed, or the time limit was exceeded (status
            DEADLINE_EXCEEDED).
    """
    arrived: queue.SimpleQueue[tuple[Any, InferenceServerException | None]] = queue.SimpleQueue()
    deadline = time.monotonic() + timeout_s
    connection.start_stream(lambda result, error: arrived.put((result, error)))
    is_complete = False
    try:
        connection.async_stream_infer(model, list(inputs), enable_empty_final_response=True, **_sequence(turn))
        while not is_complete:
            try:
                result, error = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise InferenceServerException("Deadline Exceeded", "StatusCode.DEADLINE_EXCEEDED") from None
            is_complete = error is not None or is_final(result)
            if error is not None:
                raise error
            if result.get_response().outputs:
                yield result
    finally:
        connection.stop_stream(cancel_requests=not is_complete)


def is_final(result: triton.InferResult) -> bool:
    """Return whether an answer is the last of its request, which Triton says in each answer of a stream."""
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def _sequence(turn: Turn | None) -> dict[str, Any]:
    if turn is None:
        return {}
    return {"sequence_id": turn.session, "sequence_start": turn.is_first, "sequence_end": turn.is_last}
