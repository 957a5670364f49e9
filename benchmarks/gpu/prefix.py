"""Time requests that begin with the same tokens on a GPU, with the prefix cache and without.

    python3 -m benchmarks.gpu.prefix --csv=prefix.csv
    python3 -m benchmarks.gpu.prefix --sizes='["Llama 3.1 8B"]' --shared=4000

The weights are random and made on the GPU. All requests arrive at once and stream; each has the shared tokens, then
tokens of its own. Those of the row ``shared`` 0 have as many tokens, and share none: the cache must not slow them down.
Every run draws other tokens, so that nothing is left of the one before. Medians over the runs but the first.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backends.fastertransformer.engine.engine import Engine
from backends.fastertransformer.engine.rows.answer import Answer
from benchmarks.engine.generate import Ask, tensors_of
from benchmarks.gpu.models import Table, engine_of, find_size, need_gpu
from handover.arguments import ScriptArguments
from handover.errors import ServerError, exit_status

_PATIENCE_S = 300.0


@dataclass(frozen=True)
class PrefixArguments(ScriptArguments):
    """What to measure."""

    sizes: tuple[str, ...] = field(default=("5B",), metadata={"help": "JSON list of models"})
    requests: int = field(default=64, metadata={"help": "that arrive at once"})
    shared: int = field(default=1000, metadata={"help": "tokens that all of them begin with"})
    own: int = field(default=50, metadata={"help": "tokens of each alone"})
    output: int = field(default=100, metadata={"help": "tokens that each wants"})
    repeats: int = field(default=3, metadata={"help": "runs that count"})
    data_type: str = field(default="fp16", metadata={"help": "fp16 or bf16"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One way of serving one kind of requests."""

    model: str
    data_type: str
    prefix_cache: int
    requests: int
    shared: int
    own: int
    tokens_per_s: float
    p50_first_token_ms: float


class Request:
    """A request that was sent.

    Attributes:
        first_s: when its first token came; None: it has not.
        last_s: when its last answer came.
        problem: why it failed.
    """

    def __init__(self, engine: Engine, ask: Ask) -> None:
        self.first_s: float | None = None
        self.last_s, self.problem, self._is_done = 0.0, "", threading.Event()
        engine.submit(engine.parse(tensors_of([ask], engine.config.vocab_size)), self._take, True)

    def _take(self, answer: Answer) -> None:
        self.last_s = time.perf_counter()
        self.first_s = self.first_s or self.last_s
        self.problem = getattr(answer, "problem", "")
        if answer.is_final:
            self._is_done.set()

    def wait(self) -> None:
        """Wait for the last answer."""
        if not self._is_done.wait(_PATIENCE_S) or self.problem:
            raise ServerError(self.problem or f"no answer within {_PATIENCE_S:g} s")


def asks_of(arguments: PrefixArguments, shared: int, vocab: int, draw: random.Random) -> list[Ask]:
    """Draw requests of which the first ``shared`` tokens are the same."""
    tokens, begin = range(vocab), draw.choices(range(vocab), k=shared)
    own = arguments.shared + arguments.own - shared
    return [Ask([*begin, *draw.choices(tokens, k=own)], arguments.output) for _ in range(arguments.requests)]


def answer_all(engine: Engine, asks: Sequence[Ask]) -> tuple[float, float]:
    """Send all at once; returns the seconds until the last answer, and the median seconds until a first token."""
    start = time.perf_counter()
    sent = [Request(engine, ask) for ask in asks]
    for request in sent:
        request.wait()
    return max(each.last_s for each in sent) - start, statistics.median((each.first_s or 0) - start for each in sent)


def main(argv: Sequence[str]) -> None:
    """Measure each model with the cache and without."""
    arguments = PrefixArguments.from_argv(argv, description=__doc__)
    need_gpu()
    table = Table(arguments.csv, arguments.commit)
    for name in arguments.sizes:
        size = find_size(name)
        for has_cache in (True, False):
            draw = random.Random(1)
            with engine_of(size, arguments.data_type, has_prefix_cache=has_cache) as engine:
                print(engine.description, flush=True)
                for shared in (arguments.shared, 0):
                    runs = [
                        answer_all(engine, asks_of(arguments, shared, size.vocab, draw))
                        for _ in range(arguments.repeats + 1)
                    ][1:]
                    seconds, first_s = (statistics.median(times) for times in zip(*runs, strict=True))
                    tokens = arguments.requests * arguments.output
                    known = name, arguments.data_type, int(has_cache), arguments.requests, shared
                    own = arguments.shared + arguments.own - shared
                    table.add(Row(*known, own, tokens / seconds, 1000 * first_s))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.prefix"))
