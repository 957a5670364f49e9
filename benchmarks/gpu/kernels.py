"""Time the products of a decode step on a GPU, as the engine makes them and as torch does: part of the read bandwidth.

    python3 -m benchmarks.gpu.kernels --csv=kernels.csv

Many matrices of each shape, more than the caches hold, are multiplied one after another in a CUDA graph. qkv and up
have the norm before them, up an activation behind it, out and down add the residual; torch's time is that of the bare
product of fp16 or bf16 numbers. ``layer`` is all four, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from backends.fastertransformer.engine.model.precision import TORCH_TYPES
from backends.fastertransformer.engine.ops import choose_ops
from backends.fastertransformer.engine.ops.linear import Int8Linear, Linear, Norm
from benchmarks.gpu.models import Table, find_size, measure_rates, median_seconds, need_gpu
from handover.arguments import ScriptArguments
from handover.errors import exit_status

_ROTATED_BYTES = 400_000_000
Works = list[Callable[[], object]]


@dataclass(frozen=True)
class KernelArguments(ScriptArguments):
    """What to measure."""

    sizes: tuple[str, ...] = field(default=("1.3B", "5B", "20B"), metadata={"help": "JSON list of models"})
    rows: tuple[int, ...] = field(default=(1, 8), metadata={"help": "JSON list"})
    data_type: str = field(default="fp16", metadata={"help": "fp16 or bf16"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One product."""

    model: str
    product: str
    data_type: str
    rows: int
    megabytes: float
    ours_us: float
    torch_us: float | None
    part_of_bandwidth: float


def time_graph(works: Works) -> float:
    """Capture works one after another -> microseconds of one."""
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    return 1e6 * median_seconds(graph.replay, 10) / len(works)


def make_works(hidden: int, rows: int, kind: type[Linear], dtype: torch.dtype) -> dict[str, tuple[int, Works, Works]]:
    """Give each product's bytes, and enough of it, ours and torch's."""
    device = torch.device("cuda")
    ops = choose_ops(device)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device) * 0.02

    stream, attended, inner = drawn(rows, hidden), drawn(rows, hidden), drawn(rows, 4 * hidden)
    norm = Norm(1 + drawn(hidden), drawn(hidden), 1e-5)
    # Outputs and inputs by the hidden size, what is multiplied, and how.
    products: dict[str, tuple[int, int, Tensor, dict[str, object]]] = {
        "qkv": (3, 1, stream, {"norm": norm}),
        "out": (1, 1, attended, {"residual": stream}),
        "up": (4, 1, stream, {"norm": norm, "activation": "gelu"}),
        "down": (1, 4, inner, {"residual": stream}),
    }
    works = {}
    for name, (outputs, inputs, x, how) in products.items():
        size_bytes = outputs * inputs * hidden**2 * (1 if kind is Int8Linear else dtype.itemsize)
        weights = [drawn(outputs * hidden, inputs * hidden) for _ in range(max(3, _ROTATED_BYTES // size_bytes))]
        linears = [kind(weight, drawn(outputs * hidden)) for weight in weights]
        ours: Works = [partial(ops.linear, linear, x, **how) for linear in linears]
        works[name] = size_bytes, ours, list[Callable[[], object]](partial(F.linear, x, weight) for weight in weights)
    return works


def measure(arguments: KernelArguments, table: Table, read_bytes: float) -> None:
    """Fill the table."""
    dtype = TORCH_TYPES[arguments.data_type]
    for name, rows, kind in product(arguments.sizes, arguments.rows, (Linear, Int8Linear)):
        is_int8 = kind is Int8Linear
        works = make_works(find_size(name).hidden, rows, kind, dtype)
        turns = zip(*(ours for _, ours, _ in works.values()), strict=False)
        layer = sum(size for size, _, _ in works.values()), [work for turn in turns for work in turn], []
        for what, (size_bytes, ours, theirs) in {**works, "layer": layer}.items():
            ours_us = time_graph(ours) * (len(works) if what == "layer" else 1)
            torch_us = time_graph(theirs) if theirs and not is_int8 else None
            part = size_bytes / read_bytes / ours_us * 1e6
            label = arguments.data_type + "+int8" * is_int8
            table.add(Row(name, what, label, rows, size_bytes / 1e6, ours_us, torch_us, part))


@torch.inference_mode()
def main(argv: Sequence[str]) -> None:
    """Measure."""
    arguments = KernelArguments.from_argv(argv, description=__doc__)
    need_gpu()
    rates = measure_rates(arguments.data_type)
    print(f"reads {rates.read_bytes / 1e12:.4f} TB/s", flush=True)
    measure(arguments, Table(arguments.csv, arguments.commit), rates.read_bytes)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.kernels"))
