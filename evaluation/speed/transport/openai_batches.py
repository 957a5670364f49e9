"""Whole batches for an OpenAI API: a list of prompts in one request or, where it refuses lists, requests at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.speed.transport.openai_events import read_answer
from evaluation.speed.transport.openai_wire import Dialect, OpenAIWire
from handover.endpoint import Endpoint
from handover.errors import ServerError


@dataclass(frozen=True)
class EncodedBatch:
    """A batch that is ready to be sent.

    Attributes:
        bodies: one for the batch, or one for each prompt.
        tokens: to be generated for each body.
    """

    bodies: tuple[bytes, ...]
    tokens: int


def encode_batch(dialect: Dialect, prompts: Sequence[Sequence[int]], output_length: int) -> EncodedBatch:
    """Encode prompts of token ids [B][n], each of which gets ``output_length`` tokens."""
    given = [list(prompt) for prompt in prompts]
    parts = [given] if dialect.takes_lists and len(given) > 1 else given
    bodies = [json.dumps(dialect.body(part, output_length)).encode() for part in parts]
    return EncodedBatch(tuple(bodies), output_length * len(given) // len(parts))


class OpenAIBatches:
    """Sends batches one after another over connections that are kept."""

    def __init__(self, endpoint: Endpoint, dialect: Dialect, timeout_s: float) -> None:
        self._wire = OpenAIWire(endpoint, dialect, timeout_s, is_streaming=False)
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> OpenAIBatches:
        self._loop.run_until_complete(self._wire.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run_until_complete(self._wire.__aexit__())
        self._loop.close()

    def send(self, batch: EncodedBatch) -> tuple[int, int]:
        """Send a batch and wait for all of it; returns when it was sent and when the last answer was there, in ns.

        Raises:
            ServerError: a request failed, or has not as many tokens as were asked for.
        """
        return self._loop.run_until_complete(self._send(batch))

    async def _send(self, batch: EncodedBatch) -> tuple[int, int]:
        started_ns = time.perf_counter_ns()
        answers = await asyncio.gather(*map(self._wire.exchange, batch.bodies), return_exceptions=True)
        arrived_ns: list[int] = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            tokens = read_answer(answer[-1][0], b"".join(piece for _, piece in answer))
            if sum(tokens.counts) != batch.tokens:
                raise ServerError(f"{sum(tokens.counts)} tokens were generated instead of {batch.tokens}")
            arrived_ns += tokens.times_ns
        return started_ns, max(arrived_ns)
