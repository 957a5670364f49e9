"""Servers of requests that come and go, measured the same way: the engine, and transformers' continuous batching."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np

from backends.fastertransformer.engine.arrays import Array
from backends.fastertransformer.engine.engine import Engine
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from benchmarks.engine.generate import Ask, tensors_of
from benchmarks.gpu.models import Size, peer_of
from handover.errors import ServerError

_PATIENCE_S = 60.0
_PEER_ATTENTION = "paged|sdpa"  # what transformers has without another package


class News(NamedTuple):
    """That a request has got a token, or all of them."""

    index: int
    moment_s: float
    is_final: bool


class Server(Protocol):
    """Takes requests, by number, and has news of them."""

    def send(self, index: int) -> None:
        """Send a request."""

    def next_news(self) -> News:
        """Wait for news of any request."""


class EngineServer:
    """The engine.

    Args:
        engine: open.
        asks: the requests.
        is_streaming: whether there is news of every token.
        options: further tensors of each, by name: a number.
    """

    def __init__(
        self, engine: Engine, asks: Sequence[Ask], is_streaming: bool, options: Mapping[str, Array] | None = None
    ) -> None:
        self._engine, self._is_streaming = engine, is_streaming
        tensors = [tensors_of([ask], engine.config.vocab_size) | dict(options or {}) for ask in asks]
        self._requests = [engine.parse(each) for each in tensors]
        self._answers: queue.SimpleQueue[tuple[int, float, Answer]] = queue.SimpleQueue()

    def send(self, index: int) -> None:
        """See Server."""

        def take(answer: Answer) -> None:
            self._answers.put((index, time.perf_counter(), answer))

        self._engine.submit(self._requests[index], take, self._is_streaming)

    def next_news(self) -> News:
        """See Server."""
        index, moment_s, answer = self._answers.get()
        if isinstance(answer, Failure):
            raise ServerError(f"a request failed: {answer.problem}")
        return News(index, moment_s, answer.is_final)


class PeerServer:
    """Transformers' continuous batching.

    Args:
        manager: that was started.
        asks: the requests.
        is_streaming: whether there is news of every token.
    """

    def __init__(self, manager: Any, asks: Sequence[Ask], is_streaming: bool) -> None:
        self._manager, self._asks, self._is_streaming = manager, asks, is_streaming

    def send(self, index: int) -> None:
        """See Server."""
        ask = self._asks[index]
        options = {"max_new_tokens": ask.count, "streaming": self._is_streaming, "eos_token_id": -1}
        self._manager.add_request(ask.prompt, request_id=str(index), **options)

    def next_news(self) -> News:
        """See Server."""
        result = self._manager.get_result(timeout=_PATIENCE_S)
        if result is None or result.error:
            raise ServerError(f"transformers' continuous batching failed: {result.error if result else 'no answer'}")
        return News(int(result.request_id), time.perf_counter(), result.is_finished())


@contextmanager
def peer_manager(size: Size, data_type: str, clients: int) -> Iterator[Any]:
    """Start transformers' continuous batching around random weights, with room for that many clients."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_requests_per_batch=clients)
    with peer_of(size, data_type) as model:
        model.set_attn_implementation(_PEER_ATTENTION)
        with model.continuous_batching_context_manager(generation, continuous_batching_config=batching) as manager:
            yield manager


def answer_all(server: Server, count: int, clients: int) -> tuple[float, list[float]]:
    """Keep that many requests in flight until all are answered -> seconds, and gaps between tokens in ms."""
    numbers = iter(range(count))
    seen: dict[int, float] = {}
    gaps: list[float] = []
    start = time.perf_counter()
    for index in itertools.islice(numbers, clients):
        server.send(index)
    for _ in range(count):
        is_final = False
        while not is_final:
            index, moment_s, is_final = server.next_news()
            if index in seen:
                gaps.append(1000 * (moment_s - seen[index]))
            seen[index] = moment_s
        for index in itertools.islice(numbers, 1):
            server.send(index)
    return time.perf_counter() - start, gaps


def sampling_options(top_k: int, top_p: float, temperature: float) -> dict[str, Array]:
    """Give the tensors of a request that chooses by chance."""
    return {
        "runtime_top_k": np.array([[top_k]], np.uint32),
        "runtime_top_p": np.array([[top_p]], np.float32),
        "temperature": np.array([[temperature]], np.float32),
    }
