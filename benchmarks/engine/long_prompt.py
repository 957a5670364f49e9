"""Time between tokens of rows that decode, before a long prompt arrives and while it is run: whole, and in chunks.

    python3 -m benchmarks.engine.long_prompt --csv=long_prompt.csv
    python3 -m benchmarks.engine.long_prompt --sizes='["Llama 3.1 8B"]' --chunk-tokens='[0, 256, 512]'
    python3 -m benchmarks.engine.long_prompt --sizes='["124M"]' --data-type=fp32 --prompt=2000 --rows=8    # on a CPU

The weights are random. The rows stream; when each has some tokens, the prompt arrives; "while" lasts until its first
token comes. A gap is counted where it ends. What is to hold is that the 99th percentile while the prompt is run is at
most twice the median before. Of several prompts, one after the other, all gaps count.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.rows.answer import Answer, Failure
from backends.fastertransformer.engine.settings import Settings
from benchmarks.engine.generate import Ask, tensors_of
from benchmarks.gpu.models import Table, find_size, tidy
from handover.arguments import ScriptArguments
from handover.errors import ServerError, exit_status

_PATIENCE_S = 600.0
_CONTEXT, _POSITIONS = 50, 16384  # tokens of each row's own prompt; positions that every model is given


@dataclass(frozen=True)
class LongPromptArguments(ScriptArguments):
    """What to measure."""

    sizes: tuple[str, ...] = field(default=("5B",), metadata={"help": "JSON list of models"})
    rows: int = field(default=32, metadata={"help": "that decode"})
    prompt: int = field(default=8192, metadata={"help": "tokens of the prompt"})
    chunk_tokens: tuple[int, ...] = field(
        default=(0, 128, 256, 512, 1024), metadata={"help": "JSON list: prefill_chunk_tokens; 0: whole prompts"}
    )
    before: int = field(default=100, metadata={"help": "tokens of each row before a prompt arrives"})
    repeats: int = field(default=3, metadata={"help": "prompts that count"})
    data_type: str = field(default="fp16", metadata={"help": "fp32, fp16 or bf16"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One budget; times are in milliseconds, and ``ratio`` is p99_while to p50_before."""

    model: str
    data_type: str
    chunk_tokens: int
    rows: int
    prompt: int
    p50_before: float
    p99_before: float
    p50_while: float
    p99_while: float
    most_while: float
    ratio: float
    first_token: float


class Stream:
    """A request that streams until it is stopped.

    Attributes:
        times: when its tokens came, by time.perf_counter.
        problem: why it failed; empty: it has not.
    """

    def __init__(self, engine: Engine, ask: Ask) -> None:
        self.times: list[float] = []
        self.problem, self._is_stopped, self._changed = "", False, threading.Condition()
        request = engine.parse(tensors_of([ask], engine.config.vocab_size))
        engine.submit(request, self._take, True, lambda: self._is_stopped)

    def _take(self, answer: Answer) -> None:
        now = time.perf_counter()
        with self._changed:
            if not isinstance(answer, Failure):
                self.times.append(now)
            elif not self._is_stopped:
                self.problem = answer.problem
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Wait until it has as many tokens."""
        with self._changed:
            has_come = self._changed.wait_for(lambda: len(self.times) >= count or self.problem, _PATIENCE_S)
        if not has_come or self.problem:
            raise ServerError(self.problem or f"no {count} tokens within {_PATIENCE_S:g} s")

    def stop(self) -> None:
        """Cancel it."""
        self._is_stopped = True

    def gaps(self, start: float, end: float) -> list[float]:
        """Give the milliseconds between its tokens, of which the second came between two times."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [1000 * (after - before) for before, after in pairs if start < after <= end]


@contextmanager
def serving(arguments: LongPromptArguments, name: str, chunk_tokens: int) -> Iterator[Engine]:
    """Open the engine around random weights of a size, with positions enough."""
    tidy()
    size = replace(find_size(name), positions=_POSITIONS)
    with tempfile.TemporaryDirectory(prefix="slipway-long-prompt-") as directory:
        size.write(Path(directory))
        kind = {"model_type": size.model_type, "has_made_up_weights": True, "has_prefix_cache": False}
        settings = Settings(Path(directory), 1, 1, arguments.data_type, prefill_chunk_tokens=chunk_tokens, **kind)
        engine = open_engine(settings)
    try:
        yield engine
    finally:
        engine.close()


def measure(engine: Engine, arguments: LongPromptArguments, draw: random.Random) -> tuple[list[float], ...]:
    """Send one prompt beside the rows: their gaps before and while it is run, and its time to the first token, [1]."""
    tokens = range(engine.config.vocab_size)

    def ask(length: int, count: int) -> Ask:
        return Ask(draw.choices(tokens, k=length), count)

    longest = _POSITIONS - max(_CONTEXT, arguments.prompt)
    rows = [Stream(engine, ask(_CONTEXT, longest)) for _ in range(arguments.rows)]
    for row in rows:
        row.wait(10)
    begin = time.perf_counter()
    for row in rows:
        row.wait(10 + arguments.before)
    sent = time.perf_counter()
    prompt = Stream(engine, ask(arguments.prompt, 2))
    prompt.wait(1)
    first = prompt.times[0]
    for row in rows:  # the token of the step in which it joined
        row.wait(len(row.times) + 2)
        row.stop()
    before = [gap for row in rows for gap in row.gaps(begin, sent)]
    # Tokens of one step come one after the other: those of its last step come right behind its first token.
    slack = statistics.median(before) / 2000
    return before, [gap for row in rows for gap in row.gaps(sent, first + slack)], [1000 * (first - sent)]


def main(argv: Sequence[str]) -> None:
    """Measure each model with each budget."""
    arguments = LongPromptArguments.from_argv(argv, description=__doc__)
    table = Table(arguments.csv, arguments.commit)
    for name in arguments.sizes:
        for chunk_tokens in arguments.chunk_tokens:
            draw = random.Random(1)
            with serving(arguments, name, chunk_tokens) as engine:
                print(engine.description, flush=True)
                runs = [measure(engine, arguments, draw) for _ in range(arguments.repeats + 1)][1:]
            before, during, first = ([each for run in runs for each in run[part]] for part in range(3))
            middle, high = np.percentile(before, (50, 99)).tolist()
            p50, p99 = np.percentile(during, (50, 99)).tolist()
            known = name, arguments.data_type, chunk_tokens, arguments.rows, arguments.prompt
            inside = p50, p99, max(during), p99 / middle
            table.add(Row(*known, middle, high, *inside, statistics.median(first)))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.engine.long_prompt"))
