"""Time the sums that GPUs which share a layer make after each product, and compare their results.

    python3 -m benchmarks.gpu.sums --gpus=4 --csv=sums.csv

A captured graph of 100 sums of fp16 rows with a residual, as a step has them: by NCCL, in the memory of the peers
(engine/ranks/peers.py), and by torch's one-shot sum in symmetric memory, which adds no residual. Times are of one sum,
in us.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from backends.fastertransformer.engine.parallel.group import Group
from backends.fastertransformer.engine.parallel.peer_memory import open_peer_memory
from backends.fastertransformer.engine.parallel.rank import Ranks
from backends.fastertransformer.engine.settings import Settings
from benchmarks.gpu.models import Table, median_seconds, need_gpu
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, exit_status

_SUMS = 100  # in a graph
_MOST_ROWS = 64
_TIMEOUT_S = 100.0


@dataclass(frozen=True)
class SumsArguments(ScriptArguments):
    """What to measure."""

    gpus: int = field(default=4, metadata={"help": "GPUs that add up"})
    hidden: int = field(default=8192, metadata={"help": "numbers of a row"})
    rows: tuple[int, ...] = field(default=(1, 2, 4, 8, 16, 32, 64), metadata={"help": "JSON list of rows of a sum"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One number of rows; us, None where it cannot be had; error: the largest of a peers' sum, relative to fp64's."""

    gpus: int
    rows: int
    kilobytes: float
    nccl_us: float
    peers_us: float | None
    symmetric_us: float | None
    error: float | None


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """Capture work, after one run that compiles what it needs."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph.replay


def time_sum(work: Callable[[], object]) -> float:
    """Time one of many in a graph, us."""

    def many() -> None:
        for _ in range(_SUMS):
            work()

    return 1e6 * median_seconds(captured(many), 5) / _SUMS


def symmetric_sum(group: Group, numbers: int) -> Callable[[], object] | None:
    """Give torch's one-shot sum of bf16 numbers (it has none of fp16); None: it cannot be had."""
    import torch.distributed._symmetric_memory as symmetric

    try:
        buffer = symmetric.empty(numbers, dtype=torch.bfloat16, device=torch.device("cuda", group.rank))
        symmetric.rendezvous(buffer, group.neighbours)
        buffer.normal_()
        name = group.neighbours.group_name
        torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", name)
    except RuntimeError as error:
        sys.stdout.write(f"no symmetric sum: {error}\n")
        return None
    return lambda: torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", name)


def error_of(group: Group, peers: Any, numbers: int) -> float:
    """Add up once by the peers and once in fp64; the sums must be the same in every process."""
    x, part = torch.randn(numbers, device="cuda"), torch.randn(numbers, device="cuda")
    dist.broadcast(x, 0, group=group.neighbours)
    exact = part.double()
    dist.all_reduce(exact, group=group.neighbours)
    exact += x
    peers.all_reduce_add(x, part)
    first = x.clone()
    dist.broadcast(first, 0, group=group.neighbours)
    if not torch.equal(first, x):
        raise ConfigError("the processes' sums differ", "see engine/kernels/peer_sum.py")
    return float((x - exact).abs().max() / exact.abs().max())


def measure(rank: int, arguments: SumsArguments, directory: str) -> None:
    """Take part as one process; rank 0 prints."""
    size, device = arguments.gpus, torch.device("cuda", rank)
    torch.cuda.set_device(device)
    ranks = Ranks(rank, size, rank, size, f"{directory}/rendezvous", directory, _TIMEOUT_S)
    group = Group(ranks, device, Settings(Path(directory), size, 1, "fp16") if rank == 0 else None)
    peers = open_peer_memory(group, device, _MOST_ROWS * arguments.hidden)
    table = Table(arguments.csv, arguments.commit) if rank == 0 else None
    for rows in arguments.rows:
        numbers = rows * arguments.hidden
        part = torch.zeros(numbers, dtype=torch.float16, device=device)
        x, wide = torch.zeros_like(part), part.float()

        def by_nccl(part: Any = part, x: Any = x) -> None:
            dist.all_reduce(part, group=group.neighbours)
            x.add_(part)

        nccl_us = time_sum(by_nccl)
        error = error_of(group, peers, numbers) if peers else None
        peers_us = time_sum(lambda x=x, wide=wide: peers.all_reduce_add(x, wide)) if peers else None  # type: ignore[misc]
        symmetric = symmetric_sum(group, numbers)
        symmetric_us = time_sum(symmetric) if symmetric else None
        if table:
            table.add(Row(size, rows, numbers * 2 / 1000, nccl_us, peers_us, symmetric_us, error))
    group.all_reduce_min(1)
    group.control.announce_shutdown()
    group.close()


def main(argv: Sequence[str]) -> None:
    """Start the processes."""
    arguments = SumsArguments.from_argv(argv, description=__doc__)
    need_gpu()
    if arguments.gpus > torch.cuda.device_count():
        raise ConfigError(f"{arguments.gpus} GPUs; there are {torch.cuda.device_count()}", "choose fewer: --gpus")
    with tempfile.TemporaryDirectory(prefix="slipway-sums-") as directory:
        spawn(measure, (arguments, directory), arguments.gpus)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.sums"))
