"""Time generation over several GPUs that share each layer: latency, the floor, and what more GPUs give.

    python3 -m benchmarks.gpu.scaling --csv=scaling.csv
    python3 -m benchmarks.gpu.scaling --sizes='["43B"]' --gpus='[4]' --sums='["nccl", "peers"]'

The weights are random and each process makes its own. A case is one request of that many rows of equal length, greedy,
which ends at no token; latency is a client's of the engine as it is served, median of several. floor_ms is the time to
read a GPU's part of the matrices once an output token at the bandwidth of one, speed_up is against the fewest GPUs of
the same run, and sums says how the GPUs add up: in each other's memory where they are few numbers (peers), or NCCL.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch

from backends.fastertransformer.engine.model.precision import TORCH_TYPES
from backends.fastertransformer.engine.parallel.comm import PEER_MEMORY
from benchmarks.gpu.decode import Case, asks_of, latency_ms
from benchmarks.gpu.models import Rates, Table, engine_of, find_size, measure_rates, need_gpu, tidy
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, exit_status

_SUMS = ("peers", "nccl")


@dataclass(frozen=True)
class ScalingArguments(ScriptArguments):
    """What to measure."""

    sizes: tuple[str, ...] = field(default=("43B", "20B", "5B"), metadata={"help": "JSON list of models"})
    gpus: tuple[int, ...] = field(default=(1, 2, 4), metadata={"help": "JSON list of numbers of GPUs"})
    lengths: tuple[tuple[int, int], ...] = field(
        default=((60, 20), (225, 20), (200, 200)), metadata={"help": "JSON list of [input, output], in tokens"}
    )
    batches: tuple[int, ...] = field(default=(1, 8), metadata={"help": "JSON list of rows of a request"})
    sums: tuple[str, ...] = field(default=("peers",), metadata={"help": f"JSON list of {_SUMS}"})
    data_type: str = field(default="fp16", metadata={"help": "fp16 or bf16"})
    int8_mode: int = field(default=0, metadata={"help": "of the engine"})
    repeats: int = field(default=3, metadata={"help": "measurements of each case; the median counts"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One case of one model; times in ms, None where nothing was measured."""

    model: str
    data_type: str
    gpus: int
    sums: str
    batch: int
    input_length: int
    output_length: int
    floor_ms: float
    first_ms: float
    ours_ms: float
    ratio: float
    speed_up: float | None


def measure(arguments: ScalingArguments, name: str, rates: Rates, table: Table) -> None:
    """Fill the table's rows of one model."""
    size, item_bytes = find_size(name), TORCH_TYPES[arguments.data_type].itemsize
    kind, is_int8 = arguments.data_type + "+int8" * bool(arguments.int8_mode), bool(arguments.int8_mode)
    cases: list[Case] = [(batch, *lengths) for lengths, batch in product(arguments.lengths, arguments.batches)]
    fewest: dict[Case, float] = {}
    for gpus, sums in product(arguments.gpus, arguments.sums):
        if gpus == 1 and sums != arguments.sums[0]:
            continue
        token_ms = 1000 * size.weight_bytes(item_bytes, is_int8) / rates.read_bytes / gpus
        # In a process of its own: only the first engine of several GPUs there maps their memory.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            times = process.submit(time_engine, arguments, name, gpus, sums, cases).result()
        for case, (first_ms, ours_ms) in zip(cases, times, strict=True):
            fewest.setdefault(case, ours_ms)
            row = Row(
                name,
                kind,
                gpus,
                sums if gpus > 1 else "",
                *case,
                floor_ms=token_ms * case[2],
                first_ms=first_ms,
                ours_ms=ours_ms,
                ratio=ours_ms / (token_ms * case[2]),
                speed_up=fewest[case] / ours_ms if gpus > min(arguments.gpus) else None,
            )
            table.add(row)


def time_engine(
    arguments: ScalingArguments, name: str, gpus: int, sums: str, cases: Sequence[Case]
) -> list[tuple[float, float]]:
    """Open an engine; give each case's latency, ms: the first, and the median of those behind it."""
    size, how = find_size(name), {"tensor_para_size": gpus, "has_peer_sums": sums == "peers"}
    with engine_of(size, arguments.data_type, arguments.int8_mode, **how) as engine:
        print(engine.description, flush=True)
        if sums == "peers" and gpus > 1 and PEER_MEMORY not in engine.description:
            raise ConfigError("sums in peer memory", "they cannot be made here; see above, or --sums='[\"nccl\"]'")

        def time_case(case: Case) -> tuple[float, float]:
            tensors = size.tensors(asks_of(case, size.vocab))
            return latency_ms(lambda: engine.generate([engine.parse(tensors)]), arguments.repeats)

        return list(map(time_case, cases))


def main(argv: Sequence[str]) -> None:
    """Measure a GPU, then each model over several."""
    arguments = ScalingArguments.from_argv(argv, description=__doc__)
    need_gpu()
    if max(arguments.gpus) > torch.cuda.device_count():
        raise ConfigError(f"{max(arguments.gpus)} GPUs; there are {torch.cuda.device_count()}", "choose fewer: --gpus")
    if not set(arguments.sums) <= set(_SUMS):
        raise ConfigError(f"sums {arguments.sums}", f"each is one of {_SUMS}")
    rates = measure_rates(arguments.data_type)
    tidy()  # or what it leaves would be missing to engines that share the first GPU
    print(f"reads {rates.read_bytes / 1e12:.4f} TB/s", flush=True)
    table = Table(arguments.csv, arguments.commit)
    for name in arguments.sizes:
        measure(arguments, name, rates, table)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.scaling"))
