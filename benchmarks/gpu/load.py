"""Output tokens a second of the engine on a GPU, many requests of mixed lengths at a time.

    python3 -m benchmarks.gpu.load --csv=load.csv

First 256 requests with 20 to 400 tokens in and 20 to 200 out (random.Random(1234): 54,263 in, 28,703 out), submitted
together; the median of several runs, and once more with sampled tokens. Then a number of clients, each of which
sends its next request when it has its answer; lengths are log-normal, many short and a few long ones, as in logs of
chats. The engine with in-flight batching, with FasterTransformer's static batching, and transformers' continuous
batching. ITL is the time between two tokens of a request that streams.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backends.fastertransformer.engine.arrays import Array
from benchmarks.engine.continuous import EngineServer, PeerServer, Server, answer_all, peer_manager, sampling_options
from benchmarks.engine.generate import Ask
from benchmarks.gpu.models import KINDS, Table, engine_of, find_size, need_gpu
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, exit_status

_SEED = 1234
_SERVERS = ("inflight", "static", "transformers")
_CHOICES: dict[str, dict[str, Array]] = {
    "greedy": {},
    "top-k, top-p": sampling_options(40, 0.9, 0.8),
    "top-p": sampling_options(0, 0.9, 0.8),
}


@dataclass(frozen=True)
class LoadArguments(ScriptArguments):
    """What to measure."""

    sizes: tuple[str, ...] = field(default=("5B", "20B"), metadata={"help": "JSON list of models"})
    servers: tuple[str, ...] = field(default=_SERVERS, metadata={"help": f"JSON list of {', '.join(_SERVERS)}"})
    clients: tuple[int, ...] = field(default=(1, 8, 32, 128), metadata={"help": "JSON list; [] for none"})
    requests_a_client: int = field(default=4, metadata={"help": "that each sends, at least 8 in all"})
    lengths: tuple[int, ...] = field(
        default=(), metadata={"help": "JSON list: input and output of clients' requests; []: as in chats"}
    )
    kv_cache_bytes: int = field(default=0, metadata={"help": "of the engine, where memory is to be the limit; 0: all"})
    repeats: int = field(default=3, metadata={"help": "runs of the 256; the median counts. 0: none"})
    choices: tuple[str, ...] = field(
        default=tuple(_CHOICES), metadata={"help": f"JSON list: how the engine chooses, {', '.join(_CHOICES)}"}
    )
    data_type: str = field(default="fp16", metadata={"help": "fp16 or bf16"})
    int8_mode: int = field(default=0, metadata={"help": "of the engine"})
    kinds: tuple[str, ...] = field(default=("",), metadata={"help": f"JSON list of the engine's numbers: {KINDS}"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One load on one model; the gaps between tokens are None where nothing streamed."""

    model: str
    data_type: str
    server: str
    choice: str
    clients: int
    requests: int
    output_tokens: int
    seconds: float
    tokens_per_s: float
    p50_itl_ms: float | None = None
    p99_itl_ms: float | None = None


class Load(NamedTuple):
    """Requests, how many at a time, how often, and how tokens are chosen."""

    asks: list[Ask]
    clients: int
    is_streaming: bool
    repeats: int = 1
    choice: str = "greedy"


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


def equal_asks(vocab: int, count: int, given: int, wanted: int) -> list[Ask]:
    """Draw requests of one length."""
    draw = random.Random(_SEED)
    return [Ask(draw.choices(range(vocab), k=given), wanted) for _ in range(count)]


def loads_of(arguments: LoadArguments, server: str, vocab: int) -> Iterator[Load]:
    """Give what a server is to answer."""
    if arguments.repeats and server != "transformers":
        for choice in arguments.choices if server == "inflight" else ("greedy",):
            yield Load(mixed_asks(vocab), 256, False, arguments.repeats, choice)
    for clients in arguments.clients:
        count = max(8, arguments.requests_a_client * clients)
        asks = equal_asks(vocab, count, *arguments.lengths) if arguments.lengths else chat_asks(vocab, count)
        yield Load(asks, clients, True)


@contextmanager
def serving(arguments: LoadArguments, name: str, server: str, kind: str) -> Iterator[Callable[[Load], Server]]:
    """Open a server around a model of that size; give what makes it ready for a load."""
    size = find_size(name)
    if server == "transformers":
        with peer_manager(size, arguments.data_type, max(arguments.clients)) as manager:
            yield lambda load: PeerServer(manager, load.asks, load.is_streaming)
        return
    is_inflight = server == "inflight"
    how = {"has_inflight_batching": is_inflight, "kv_cache_bytes": arguments.kv_cache_bytes}
    with engine_of(size, arguments.data_type, arguments.int8_mode, kind, **how) as engine:
        print(engine.description, flush=True)
        yield lambda load: EngineServer(engine, load.asks, load.is_streaming, _CHOICES[load.choice])


def measure(arguments: LoadArguments, name: str, server: str, numbers: str, table: Table) -> None:
    """Fill the table's rows of one model and server, whose numbers are of a kind."""
    loads = list(loads_of(arguments, server, find_size(name).vocab))
    kind = arguments.data_type
    if server != "transformers":
        kind += "+int8" * bool(arguments.int8_mode) + f"+{numbers}" * bool(numbers)
    with serving(arguments, name, server, numbers) as ready:
        for load in loads:
            runs = [answer_all(ready(load), len(load.asks), load.clients) for _ in range(load.repeats)]
            seconds, gaps = statistics.median_low(run[0] for run in runs), runs[-1][1]
            tokens = sum(ask.count for ask in load.asks)
            row = partial(Row, name, kind, server, load.choice, load.clients, len(load.asks), tokens, seconds)
            table.add(row(tokens / seconds, *(np.percentile(gaps, (50, 99)).tolist() if gaps else ())))


def main(argv: Sequence[str]) -> None:
    """Measure each model on each server."""
    arguments = LoadArguments.from_argv(argv, description=__doc__)
    for given, known in ((arguments.servers, _SERVERS), (arguments.choices, _CHOICES), (arguments.kinds, KINDS)):
        if unknown := set(given) - set(known):
            raise ConfigError(f"there is no {', '.join(sorted(unknown))}", f"there are {', '.join(known)}")
    if len(arguments.lengths) not in (0, 2):
        raise ConfigError(f"lengths {arguments.lengths}", "they are [input, output], or [] for those of chats")
    need_gpu()
    table = Table(arguments.csv, arguments.commit)
    for name, server, kind in itertools.product(arguments.sizes, arguments.servers, arguments.kinds):
        if server != "transformers" or (arguments.clients and kind == arguments.kinds[0]):
            measure(arguments, name, server, kind, table)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.load"))
