"""Answers one after another, over a gRPC stream: what a decoupled model gives, and a place in a conversation.

A model that is not decoupled can be asked in the same way; its one answer is the last one too.
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
    """A request's place in a conversation with a stateful model.

    Attributes:
        session: names the conversation; not 0 and not empty.
        is_first, is_last: whether it begins and ends the conversation.
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
    """Send one request and give its answers as they come.

    The request is cancelled when the caller stops early. A connection carries one stream at a time.

    Args:
        connection: to the server.
        model: its name.
        inputs: the tensors.
        timeout_s: limit of all answers together.
        turn: for a stateful model.

    Raises:
        InferenceServerException: the server refused or failed, or (status DEADLINE_EXCEEDED) the time was up.
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
    """Whether no answer follows this one; Triton marks each answer of a stream."""
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


def _sequence(turn: Turn | None) -> dict[str, Any]:
    if turn is None:
        return {}
    return {"sequence_id": turn.session, "sequence_start": turn.is_first, "sequence_end": turn.is_last}
