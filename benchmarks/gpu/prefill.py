"""Time how long inputs take on a GPU up to their first token: tokens a second, and part of the rate of a large product.

    python3 -m benchmarks.gpu.prefill --csv=prefill.csv
    python3 -m benchmarks.gpu.prefill --sizes='["5B"]' --int8-mode=1 --profile=kernels.txt

The weights are random and made on the GPU. A case is one request of rows of equal length that wants one token, timed at
a client of the engine as it is served, median of several. ``part`` counts two operations a number of each matrix and
token, and attention to what a token may see, over the time and the rate of an 8192 x 8192 product in the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.decode import asks_of, latency_ms
from benchmarks.gpu.models import Rates, Table, engine_of, find_size, kernel_times, measure_rates, need_gpu
from handover.arguments import ScriptArguments
from handover.errors import exit_status


@dataclass(frozen=True)
class PrefillArguments(ScriptArguments):
    """What to measure."""

    sizes: tuple[str, ...] = field(default=("5B", "20B"), metadata={"help": "JSON list of models"})
    shapes: tuple[tuple[int, int], ...] = field(
        default=((1, 2048), (8, 512), (4, 2048)), metadata={"help": "JSON list of [rows, tokens of each]"}
    )
    data_type: str = field(default="fp16", metadata={"help": "fp16 or bf16"})
    int8_mode: int = field(default=0, metadata={"help": "of the engine"})
    repeats: int = field(default=7, metadata={"help": "measurements of each case; the median counts"})
    profile: Path | None = field(default=None, metadata={"help": "file that takes each case's kernels by time"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One case of one model."""

    model: str
    data_type: str
    rows: int
    tokens: int
    first_token_ms: float
    tokens_per_s: float
    tflops: float
    part: float


def measure(arguments: PrefillArguments, name: str, rates: Rates, table: Table) -> None:
    """Fill the table's rows of one model."""
    size, kind = find_size(name), arguments.data_type + "+int8" * bool(arguments.int8_mode)
    with engine_of(size, arguments.data_type, arguments.int8_mode) as engine:
        print(engine.description, flush=True)
        for rows, tokens in arguments.shapes:
            tensors = size.tensors(asks_of((rows, tokens, 1), size.vocab))
            _, taken_ms = latency_ms(lambda: engine.generate([engine.parse(tensors)]), arguments.repeats)  # noqa: B023
            per_s = 1000 * size.prefill_operations(rows, tokens) / taken_ms
            rate = 1000 * rows * tokens / taken_ms
            table.add(Row(name, kind, rows, tokens, taken_ms, rate, per_s / 1e12, per_s / rates.operations))
            if arguments.profile:
                with arguments.profile.open("a") as file:
                    file.write(f"{name} {rows} x {tokens}\n")
                    file.write(kernel_times(lambda: engine.generate([engine.parse(tensors)])))  # noqa: B023


def main(argv: Sequence[str]) -> None:
    """Measure the GPU, then each model."""
    arguments = PrefillArguments.from_argv(argv, description=__doc__)
    need_gpu()
    rates = measure_rates(arguments.data_type)
    print(f"multiplies at {rates.operations / 1e12:.0f} TFLOP/s", flush=True)
    table = Table(arguments.csv, arguments.commit)
    for name in arguments.sizes:
        measure(arguments, name, rates, table)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.prefill"))
