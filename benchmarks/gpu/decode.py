"""Time generation on a GPU: the engine as it is served, transformers' generate(), and the floor, by model and batch.

    python3 -m benchmarks.gpu.decode --csv=decode.csv
    python3 -m benchmarks.gpu.decode --sizes='["5B"]' --batches='[1, 8]' --int8-mode=1 --peer=none

The weights are random and made on the GPU. A case is one request of that many rows of equal length, greedy, which ends
at no token; latency is a client's, from the request's tensors to the answer's, median of several. floor_ms is the time
to read the matrices once an output token, and a T5's encoder once, at the measured bandwidth; compute_ms the time of
the matrix products at the measured rate. ratio is ours to floor_ms, peer_ratio transformers' to ours. first_ms is the
engine's very first answer to that case.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import torch

from backends.fastertransformer.engine.model.precision import TORCH_TYPES
from benchmarks.engine.generate import Ask, generate_by_transformers
from benchmarks.gpu.models import (
    KINDS,
    Rates,
    Table,
    engine_of,
    find_size,
    kernel_times,
    measure_rates,
    need_gpu,
    peer_of,
)
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, exit_status

_PEERS = ("none", "dynamic", "static")
Case = tuple[int, int, int]  # rows, input and output length


@dataclass(frozen=True)
class DecodeArguments(ScriptArguments):
    """What to measure."""

    sizes: tuple[str, ...] = field(default=("1.3B", "5B", "20B", "43B"), metadata={"help": "JSON list of models"})
    lengths: tuple[tuple[int, int], ...] = field(
        default=((60, 20), (225, 20), (200, 200)), metadata={"help": "JSON list of [input, output], in tokens"}
    )
    batches: tuple[int, ...] = field(default=(1, 8), metadata={"help": "JSON list of rows of a request"})
    data_type: str = field(default="fp16", metadata={"help": "fp16 or bf16, on both sides"})
    int8_mode: int = field(default=0, metadata={"help": "of the engine"})
    kinds: tuple[str, ...] = field(default=("",), metadata={"help": f"JSON list of the engine's numbers: {KINDS}"})
    peer: str = field(default="dynamic", metadata={"help": "transformers' cache: dynamic, static (compiled), or none"})
    peer_output: int = field(
        default=200, metadata={"help": "longest output that transformers is timed with; it is slow"}
    )
    repeats: int = field(default=5, metadata={"help": "measurements of each case and side; the median counts"})
    tensor_para_size: int = field(default=1, metadata={"help": "GPUs that share each layer, of the engine"})
    profile: Path | None = field(default=None, metadata={"help": "file that takes each case's kernels by time"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One case of one model; times in ms, None where nothing was measured."""

    model: str
    data_type: str
    gpus: int
    batch: int
    input_length: int
    output_length: int
    floor_ms: float
    compute_ms: float
    peer_ms: float | None
    first_ms: float
    ours_ms: float
    ratio: float
    peer_ratio: float | None


def latency_ms(side: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Time calls that wait for their answer: the first, and the median of those behind it."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        side()
        times.append(1000 * (time.perf_counter() - start))
    return times[0], statistics.median(times[1:])


def asks_of(case: Case, vocab: int) -> list[Ask]:
    """Draw the rows of a case."""
    batch, input_length, output_length = case
    draw = torch.Generator().manual_seed(1234)
    ids = torch.randint(0, vocab, (batch, input_length), generator=draw)
    return [Ask(row, output_length) for row in ids.tolist()]


def time_peer(arguments: DecodeArguments, name: str, cases: Sequence[Case]) -> dict[Case, float]:
    """Time transformers on every case, ms."""
    if arguments.peer == "none":
        return {}
    size, found = find_size(name), {}
    options = {"cache_implementation": "static"} if arguments.peer == "static" else {}
    with peer_of(size, arguments.data_type) as model:
        for case in (each for each in cases if each[2] <= arguments.peer_output):
            run = partial(generate_by_transformers, model, asks_of(case, size.vocab), **options)
            found[case] = latency_ms(run, arguments.repeats)[1]
    return found


def measure(arguments: DecodeArguments, name: str, kind: str, rates: Rates, table: Table) -> None:
    """Fill the table's rows of one model, whose numbers are of a kind."""
    size, gpus = find_size(name), arguments.tensor_para_size
    cases = [(batch, *lengths) for lengths, batch in product(arguments.lengths, arguments.batches)]
    theirs = time_peer(arguments, name, cases)
    item_bytes, is_int8 = TORCH_TYPES[arguments.data_type].itemsize, bool(arguments.int8_mode)
    token_ms = 1000 * size.weight_bytes(item_bytes, is_int8, kind) / rates.read_bytes / gpus
    once_ms = 1000 * size.once_bytes(item_bytes, is_int8) / rates.read_bytes / gpus
    with engine_of(size, arguments.data_type, arguments.int8_mode, kind, tensor_para_size=gpus) as engine:
        print(engine.description, flush=True)
        for case in cases:
            tensors = size.tensors(asks_of(case, size.vocab))
            first_ms, ours_ms = latency_ms(lambda: engine.generate([engine.parse(tensors)]), arguments.repeats)  # noqa: B023
            floor_ms = once_ms + token_ms * case[2]
            row = Row(
                name,
                arguments.data_type + "+int8" * is_int8 + f"+{kind}" * bool(kind),
                gpus,
                *case,
                floor_ms=floor_ms,
                compute_ms=1000 * size.operations(*case) / rates.operations / gpus,
                peer_ms=theirs.get(case),
                first_ms=first_ms,
                ours_ms=ours_ms,
                ratio=ours_ms / floor_ms,
                peer_ratio=theirs[case] / ours_ms if case in theirs else None,
            )
            table.add(row)
            if arguments.profile:
                with arguments.profile.open("a") as file:
                    file.write(f"{name} {case}\n{kernel_times(lambda: engine.generate([engine.parse(tensors)]))}")  # noqa: B023


def main(argv: Sequence[str]) -> None:
    """Measure the GPU, then each model."""
    arguments = DecodeArguments.from_argv(argv, description=__doc__)
    if arguments.peer not in _PEERS or arguments.data_type not in ("fp16", "bf16") or set(arguments.kinds) - {*KINDS}:
        raise ConfigError(
            f"peer {arguments.peer}, data_type {arguments.data_type}, kinds {arguments.kinds}",
            f"peer is one of {_PEERS}, data_type fp16 or bf16, kinds are of {KINDS}",
        )
    need_gpu()
    rates = measure_rates(arguments.data_type)
    print(f"reads {rates.read_bytes / 1e12:.4f} TB/s, multiplies at {rates.operations / 1e12:.0f} TFLOP/s", flush=True)
    table = Table(arguments.csv, arguments.commit)
    for name, kind in product(arguments.sizes, arguments.kinds):
        measure(arguments, name, kind, rates, table)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.decode"))
