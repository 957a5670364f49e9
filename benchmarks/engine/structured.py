"""Tokens a second with and without a grammar, by turns in one process, and their ratio.

    python3 -m benchmarks.engine.structured                                                # the demonstration model
    python3 -m benchmarks.engine.structured --device=cuda --size="Llama 3.1 8B" --data-type=fp16 --csv=structured.csv

With ``--size`` the weights are random, and so are the words of the vocabulary behind those of a byte. The grammar is
that of a list of objects, too long for any row to end. Both sides choose their tokens in the same way: greedily, and
drawn at temperature 1. What is to hold is a ratio of at least 0.95. The two sides take turns, and the ratio is the
median of those of a turn, so that what else the machine does changes it little.

Below each line is where the time of the guided steps goes. On a GPU, masks that take less time than a plain step cost
nothing, because the network runs meanwhile. Where the host waits for tokens, the GPU decides how long a step takes.
"""

from __future__ import annotations

import json
import random
import statistics
import string
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from backends.fastertransformer.engine.engine import Engine, open_engine
from backends.fastertransformer.engine.grammar.masks import RowMasks
from backends.fastertransformer.engine.sampling.pending import PendingTokens
from backends.fastertransformer.engine.settings import Settings
from benchmarks.engine.generate import Ask, tensors_of
from benchmarks.gpu.models import Table, find_size
from export_scripts.arguments import ConvertArguments
from handover.arguments import ScriptArguments
from handover.errors import exit_status

_ARCHIVE = Path(__file__).resolve().parents[2] / "examples/gpt3_demo/checkpoints/gpt3_demo.nemo"
_CONTEXT = 16  # tokens of each prompt
_SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "is_member": {"type": "boolean"},
            "city": {"enum": ["Berlin", "Lagos", "Lima", "Osaka"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        },
        "required": ["name", "age", "is_member", "city"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class StructuredArguments(ScriptArguments):
    """What to measure."""

    device: str = field(default="cpu", metadata={"help": "cpu or cuda"})
    size: str = field(default="", metadata={"help": "a model of random weights; empty: the demonstration model"})
    data_type: str = field(default="fp32", metadata={"help": "fp32, fp16 or bf16"})
    threads: int = field(default=0, metadata={"help": "of torch on a CPU; 0: one for each core"})
    rows: tuple[int, ...] = field(default=(1, 8, 32), metadata={"help": "JSON list: rows of a request"})
    tokens: int = field(default=128, metadata={"help": "of each row"})
    repeats: int = field(default=7, metadata={"help": "runs of each side that count"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One number of rows, in tokens a second of all rows: medians, also of a turn's ratio of guided to plain."""

    model: str
    data_type: str
    choice: str
    rows: int
    tokens: int
    plain: float
    guided: float
    ratio: float


class HostTimes:
    """How long the host is busy with the grammars of each step, and waits for the last tokens before it is."""

    def __init__(self) -> None:
        self.masks_s: list[float] = []
        self.waits_s: list[float] = []

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take the times of what the engine does meanwhile."""

        def timed(owner: type, name: str, seconds: list[float], is_first: bool = True) -> Any:
            original = getattr(owner, name)

            def call(*given: Any) -> Any:
                start = time.perf_counter()
                found = original(*given)
                took = time.perf_counter() - start
                if is_first:
                    seconds.append(took)
                else:
                    seconds[-1] += took
                return found

            return mock.patch.object(owner, name, call)

        with ExitStack() as patches:
            patches.enter_context(timed(PendingTokens, "by_sequence", self.waits_s))
            for name in ("follow", "resolve_without_mask", "compute"):  # a step's, in this order
                patches.enter_context(timed(RowMasks, name, self.masks_s, is_first=name == "follow"))
            yield

    def describe(self, plain_s: float, guided_s: float) -> str:
        """Write where the time of a step goes, which takes these seconds without and with a grammar."""
        masks = np.array(self.masks_s) * 1e3
        late, wait = np.maximum(masks - plain_s * 1e3, 0).mean(), sum(self.waits_s) * 1e3 / len(masks)
        spread = f"{np.median(masks):.2f} ms median, {masks.mean():.2f} mean, {np.percentile(masks, 99):.2f} p99"
        return (
            f"    a step: {plain_s * 1e3:.2f} ms plain, {guided_s * 1e3:.2f} guided; masks: {spread},"
            f" {masks.max():.2f} most, {late:.2f} beyond a plain step; the host waits {wait:.2f} ms for tokens"
        )


@contextmanager
def serving(arguments: StructuredArguments) -> Iterator[Engine]:
    """Open the engine with the model that is asked for."""
    with tempfile.TemporaryDirectory(prefix="slipway-structured-") as directory:
        shards, more = Path(directory, "1-gpu"), dict[str, Any]()
        if arguments.size:
            shards.mkdir()
            size = find_size(arguments.size)
            size.write(shards)
            (shards / "vocab.json").write_text(json.dumps(make_vocabulary(size.vocab)))
            more = {"model_type": size.model_type, "has_made_up_weights": True}
        else:
            from export_scripts.convert import convert  # it needs yaml, which a machine with a GPU may lack

            convert(ConvertArguments(_ARCHIVE, shards))
        if arguments.device == "cuda":
            more |= {"prefill_chunk_tokens": 0}  # no prompt is long, and the steps' graphs take seconds to capture
        settings = Settings(shards, 1, 1, arguments.data_type, arguments.threads, has_prefix_cache=False, **more)
        engine = open_engine(settings, torch.device(arguments.device))
        try:
            yield engine
        finally:
            engine.close()


def make_vocabulary(size: int) -> dict[str, int]:
    """Make a byte-level vocabulary of printable characters and drawn words, as ``vocab.json`` writes it."""
    draw, space = random.Random(1), "\u0120"
    words = dict.fromkeys([*string.punctuation, *string.digits, *string.ascii_letters, space])
    while len(words) < size:
        letters = draw.choices(string.ascii_lowercase, k=draw.randrange(2, 9))
        words[space * draw.randrange(2) + "".join(letters)] = None
    return {word: token for token, word in enumerate(list(words)[:size])}


def make_request(engine: Engine, rows: int, tokens: int, is_drawn: bool, is_guided: bool) -> dict[str, np.ndarray]:
    """Make a request whose rows generate as many tokens, with or without the grammar."""
    draw, vocab_size = random.Random(rows), engine.config.vocab_size
    asks = [Ask([draw.randrange(vocab_size) for _ in range(_CONTEXT)], tokens) for _ in range(rows)]
    request = tensors_of(asks, vocab_size)
    request["random_seed"] = np.arange(rows, dtype=np.uint64)[:, None]
    request["runtime_top_p"] = np.full((rows, 1), float(is_drawn), np.float32)
    if is_guided:
        request["end_id"] = np.full((rows, 1), engine.config.end_id, np.uint32)
        request["guided_decoding_guide_type"] = np.full((rows, 1), b"json_schema", object)
        request["guided_decoding_guide"] = np.full((rows, 1), json.dumps(_SCHEMA).encode(), object)
    return request


def measure(engine: Engine, arguments: StructuredArguments, rows: int, is_drawn: bool, times: HostTimes) -> Row:
    """Run both sides by turns; the first run of each compiles and does not count, nor in the times of guided steps."""
    sides = {
        is_guided: engine.parse(make_request(engine, rows, arguments.tokens, is_drawn, is_guided))
        for is_guided in (False, True)
    }
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(arguments.repeats + 1):
        for is_guided, request in sides.items():
            with times.taken() if turn and is_guided else nullcontext():
                start = time.perf_counter()
                (answer,) = engine.generate([request])
                seconds = time.perf_counter() - start
            made = int(answer["sequence_length"].sum()) - rows * _CONTEXT
            assert made == rows * arguments.tokens, "no row ends before its length"
            rates[is_guided].append(made / seconds)
    turns = list(zip(rates[False], rates[True], strict=True))[1:]
    plain, guided = (statistics.median(rates[side][1:]) for side in (False, True))
    ratio = statistics.median(guided / plain for plain, guided in turns)
    known = arguments.size or "demonstration", arguments.data_type, "drawn" if is_drawn else "greedy"
    return Row(*known, rows, arguments.tokens, plain, guided, ratio)


def main(argv: Sequence[str]) -> None:
    """Measure every number of rows, greedily and drawn."""
    arguments = StructuredArguments.from_argv(argv, description=__doc__)
    table = Table(arguments.csv, arguments.commit)
    with serving(arguments) as engine:
        print(engine.description, flush=True)
        for is_drawn in (False, True):
            for rows in arguments.rows:
                times = HostTimes()
                row = measure(engine, arguments, rows, is_drawn, times)
                table.add(row)
                print(times.describe(rows / row.plain, rows / row.guided), flush=True)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.engine.structured"))
