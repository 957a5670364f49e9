"""Measure what a request_output_len that is too large costs: 4 x the tokens that come, against their exact number.

    python3 -m benchmarks.engine.page_growth --csv=growth.csv

A made-up GPT in this process, with a KV cache that is too small for all rows. The rows are sampled once to learn their
tokens; then each ends by a stop word, its own last four tokens, under both lengths. Both ways take turns. Seconds are
those of the one thread that computes, so that other processes do not matter.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from backends.fastertransformer.engine.arrays import Array
from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.request.parse import Request
from backends.fastertransformer.engine.settings import Settings
from benchmarks.gpu.models import Table
from ft_format.tensors import NO_TOKEN
from handover.arguments import ScriptArguments
from handover.errors import exit_status

_WORD = 4  # tokens at the end of an answer that occur nowhere else in it
_VOCAB, _POSITIONS = 8000, 1024


@dataclass(frozen=True)
class GrowthArguments(ScriptArguments):
    """What to measure."""

    layers: int = field(default=4, metadata={"help": "of the model"})
    hidden: int = field(default=256, metadata={"help": "of the model"})
    requests: int = field(default=96, metadata={"help": "sent at once"})
    rows_in_cache: int = field(default=24, metadata={"help": "rows whose prompts and answers fit at once, on average"})
    factor: int = field(default=4, metadata={"help": "request_output_len, in multiples of the tokens that come"})
    rounds: int = field(default=3, metadata={"help": "turns of each way"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One way: request_output_len in multiples of the real length, median tokens/s, and that of the exact one's."""

    factor: int
    requests: int
    rows_in_cache: int
    tokens: int
    tokens_per_s: float
    ratio: float


@dataclass(frozen=True)
class Ask:
    """A request of one row."""

    prompt: Array
    length: int
    seed: int

    def request(self, engine: Engine, count: int, word: Sequence[int] = ()) -> Request:
        """Make the request, which ends after ``count`` tokens at most, or with a word."""
        one = {"input_lengths": len(self.prompt), "request_output_len": count, "end_id": NO_TOKEN, "runtime_top_k": 200}
        tensors = {name: np.array([[value]], np.uint32) for name, value in one.items()}
        tensors |= {"input_ids": self.prompt[None], "random_seed": np.array([[self.seed]], np.uint64)}
        if word:
            ends = [len(word), *[-1] * (len(word) - 1)]
            tensors["stop_words_list"] = np.array([[[*word], ends]], np.int32)
        return engine.parse(tensors)


def make_asks(count: int) -> list[Ask]:
    """Make requests of 16 to 48 tokens, and 48 to 144 to generate."""
    draw = np.random.default_rng(1)
    return [
        Ask(draw.integers(0, _VOCAB, draw.integers(16, 49), np.uint32), int(draw.integers(48, 145)), seed)
        for seed in range(count)
    ]


def answers_of(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Answer requests: the tokens of each."""
    found = []
    for outputs in engine.generate(requests):
        start, end = outputs["response_input_lengths"][0, 0], outputs["sequence_length"][0, 0]
        found.append(outputs["output_ids"][0, 0, start:end].tolist())
    return found


def measure(arguments: GrowthArguments, directory: Path) -> dict[int, tuple[int, float]]:
    """Measure both ways; for each factor the tokens of a turn, and the median seconds of a turn."""
    heads = arguments.hidden // 32
    sizes = f"head_num={heads}\nsize_per_head=32\ninter_size={4 * arguments.hidden}\nnum_layer={arguments.layers}\n"
    ini = f"[gpt]\n{sizes}vocab_size={_VOCAB}\nmax_pos_seq_len={_POSITIONS}\nstart_id=0\nend_id=1\n"
    (directory / "config.ini").write_text(ini + "weight_data_type=fp32\ntensor_para_size=1\n")
    asks = make_asks(arguments.requests)
    tokens = statistics.mean(len(ask.prompt) + ask.length for ask in asks)
    cache = int(arguments.rows_in_cache * tokens * 2 * arguments.layers * arguments.hidden * 4)
    ways = {"has_made_up_weights": True, "has_prefix_cache": False, "cpu_threads": 1}
    settings = Settings(directory, 1, 1, "fp32", kv_cache_bytes=cache, **ways)
    engine = open_engine(settings)
    learnt = answers_of(engine, [ask.request(engine, ask.length) for ask in asks])
    seconds: dict[int, list[float]] = {1: [], arguments.factor: []}
    for _ in range(arguments.rounds):
        for factor, taken in seconds.items():
            requests = [
                ask.request(engine, factor * ask.length, known[-_WORD:])
                for ask, known in zip(asks, learnt, strict=True)
            ]
            start = time.process_time()
            found = answers_of(engine, requests)
            taken.append(time.process_time() - start)
            assert found == learnt, "another way gave other tokens"
    engine.close()
    count = sum(map(len, learnt))
    return {factor: (count, statistics.median(taken)) for factor, taken in seconds.items()}


def main(argv: Sequence[str]) -> None:
    """Print the table, and write it."""
    arguments = GrowthArguments.from_argv(argv, description=__doc__)
    with tempfile.TemporaryDirectory(prefix="slipway-growth-") as directory:
        found = measure(arguments, Path(directory))
    table = Table(arguments.csv, arguments.commit)
    for factor, (tokens, seconds) in found.items():
        ratio = found[1][1] / seconds
        table.add(Row(factor, arguments.requests, arguments.rows_in_cache, tokens, tokens / seconds, ratio))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.engine.page_growth"))
