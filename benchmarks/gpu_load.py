"""Output tokens a second of the engine on a GPU, many requests of mixed lengths at a time.

    python3 -m benchmarks.gpu_load --csv=load.csv

First 256 requests with 20 to 400 tokens in and 20 to 200 out (random.Random(1234): 54,263 in, 28,703 out), submitted
together. Then so many clients, each of which sends its next request when it has its answer; lengths are log-normal,
many short and a few long ones, as in logs of chats. With in-flight batching, and with FasterTransformer's static
batching. ITL is the time between two tokens of a request that streams.
"""

from __future__ import annotations

import itertools
import queue
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from backends.fastertransformer.engine.engine import Engine
from backends.fastertransformer.engine.request import Request
from backends.fastertransformer.engine.sequence import Answer
from benchmarks.generate import Ask, tensors_of
from benchmarks.gpu_models import Table, engine_of, find_size, need_gpu
from handover.arguments import ScriptArguments
from handover.errors import ServerError, exit_status

_SEED = 1234


@dataclass(frozen=True)
class LoadArguments(ScriptArguments):
    """What to measure."""

    sizes: tuple[str, ...] = field(default=("5B", "20B"), metadata={"help": "JSON list of models"})
    clients: tuple[int, ...] = field(default=(1, 8, 32, 128), metadata={"help": "JSON list; [] for none"})
    requests_a_client: int = field(default=4, metadata={"help": "that each sends, at least 16 in all"})
    data_type: str = field(default="fp16", metadata={"help": "fp16 or bf16"})
    int8_mode: int = field(default=0, metadata={"help": "of the engine"})
    batching: tuple[str, ...] = field(default=("inflight", "static"), metadata={"help": "JSON list of either"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One load on one model; the gaps between tokens are None where nothing streamed."""

    model: str
    data_type: str
    batching: str
    clients: int
    requests: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    p50_itl_ms: float | None = None
    p99_itl_ms: float | None = None


def mixed_asks(vocab: int) -> list[Ask]:
    """Draw the 256 requests that other servers were measured with."""
    draw = random.Random(_SEED)
    lengths = [(draw.randint(20, 400), draw.randint(20, 200)) for _ in range(256)]
    return [Ask(draw.choices(range(vocab), k=given), wanted) for given, wanted in lengths]


def chat_asks(vocab: int, count: int) -> list[Ask]:
    """Draw log-normal lengths: medians 100 in and 130 out, at most 1024 and 512."""
    draw = random.Random(_SEED)

    def length(median: int, spread: float, most: int) -> int:
        return min(most, max(4, round(median * draw.lognormvariate(0, spread))))

    return [Ask(draw.choices(range(vocab), k=length(100, 1.1, 1024)), length(130, 0.9, 512)) for _ in range(count)]


def answer_all(engine: Engine, asks: Sequence[Ask], clients: int, is_streaming: bool) -> tuple[float, list[float]]:
    """Keep so many requests under way until all are answered -> seconds, and gaps between a request's tokens in ms."""
    requests: Iterator[tuple[int, Request]] = enumerate(
        [engine.parse(tensors_of([ask], engine.config.vocab_size)) for ask in asks]
    )
    arrivals: queue.SimpleQueue[tuple[int, float, Answer]] = queue.SimpleQueue()
    seen: dict[int, float] = {}
    gaps: list[float] = []

    def send(index: int, request: Request) -> None:
        engine.submit(request, lambda answer: arrivals.put((index, time.perf_counter(), answer)), is_streaming)

    start = time.perf_counter()
    for index, request in itertools.islice(requests, clients):
        send(index, request)
    for _ in asks:
        while True:
            index, moment, answer = arrivals.get()
            if answer.tensors is None:
                raise ServerError(f"a request failed: {answer.problem}")
            if index in seen:
                gaps.append(1000 * (moment - seen[index]))
            seen[index] = moment
            if answer.is_final:
                break
        for following in itertools.islice(requests, 1):
            send(*following)
    return time.perf_counter() - start, gaps


def measure(arguments: LoadArguments, name: str, batching: str, table: Table) -> None:
    """Fill the table's rows of one model and way of batching."""
    size = find_size(name)
    kind = arguments.data_type + "+int8" * bool(arguments.int8_mode)
    loads = [(mixed_asks(size.vocab), 256, False)]
    for clients in arguments.clients:
        loads.append((chat_asks(size.vocab, max(16, arguments.requests_a_client * clients)), clients, True))
    with engine_of(
        size, arguments.data_type, arguments.int8_mode, has_inflight_batching=batching == "inflight"
    ) as engine:
        print(engine.description, flush=True)
        for asks, clients, is_streaming in loads:
            seconds, gaps = answer_all(engine, asks, clients, is_streaming)
            tokens = sum(ask.count for ask in asks)
            p50, p99 = np.percentile(gaps, (50, 99)).tolist() if gaps else (None, None)
            rate = tokens / seconds
            table.add(Row(name, kind, batching, clients, len(asks), tokens, seconds, rate, p50, p99))


def main(argv: Sequence[str]) -> None:
    """Measure each model."""
    arguments = LoadArguments.from_argv(argv, description=__doc__)
    need_gpu()
    table = Table(arguments.csv, arguments.commit)
    for name, batching in itertools.product(arguments.sizes, arguments.batching):
        measure(arguments, name, batching, table)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu_load"))
