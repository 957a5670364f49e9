"""Check and time the attention of grouped heads on a GPU, by what served models need: decode, new rows, continued rows.

    python3 -m benchmarks.gpu.attention --csv=attention.csv
    python3 -m benchmarks.gpu.attention --cases='["Llama-3.1-8B 64 x 1000"]' --tiles='[[64, 2], [128, 4, 32, 2]]'
    python3 -m benchmarks.gpu.attention --cases='["Llama-3.1-8B 1 x 7968"]' --splits='[[3, 512, 384], [2, 512, 128]]'

A case is rows x cached tokens (decode), rows x new tokens (new), or rows x cached + new tokens, of which ``+ n`` rows
more have one token, behind as many cells or ``of`` another number (continued). Continued rows are timed once more with
each block of tokens left to one program (``unsplit_us``), which takes ``gain`` times as long. ``error`` is that of
attention in fp32, relative; more than LIMITS ends the program. Decode and continued rows count the bytes of keys and
values that must be read, as a part of the read bandwidth; new and continued rows count two operations a product and
visible key, as a part of the rate of a large product. Several layers' memory, more than the caches hold, is attended to
one after another in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from backends.fastertransformer.engine.cache.kv_cache import PAGE
from backends.fastertransformer.engine.model.precision import TORCH_TYPES
from backends.fastertransformer.engine.ops.positions import AttentionSpec, Rotary, Rotation, plain_frequencies
from benchmarks.gpu.kernels import time_graph
from benchmarks.gpu.models import Rates, Table, measure_rates, need_gpu
from handover.arguments import ScriptArguments
from handover.errors import ArtefactError, exit_status

LIMITS = {"fp16": 2e-3, "bf16": 1.6e-2}
_ROTATED_BYTES = 300_000_000
_DEVICE = torch.device("cuda")


class Shape(NamedTuple):
    """Attention of a model."""

    heads: int
    kv_heads: int
    size: int
    softcap: float = 0.0
    window: int = 0


_LLAMA = Shape(32, 8, 128)
SHAPES = {
    "Llama-3.1-8B": _LLAMA,
    "Qwen3-0.6B": Shape(16, 8, 128),
    "Qwen3-14B": Shape(40, 8, 128),
    "Gemma-2-9B": Shape(16, 8, 256, 50.0),
    "Gemma-2-9B local": Shape(16, 8, 256, 50.0, 4096),
}
DECODED = ((1, 200), (1, 8000), (8, 500), (64, 1000), (256, 500))
NEW = ((1, 8192), (8, 512))
# Rows, cached, new, more rows of one token, and what these have cached; the third is a chunk of a long prompt.
CONTINUED = (
    (64, 1000, 20, 0, 1000),
    (1, 7000, 1000, 32, 7000),
    (1, 7968, 224, 32, 200),
    (1, 7968, 160, 32, 200),
    (1, 7968, 96, 32, 200),
    (2, 100, 300, 5, 100),
)


@dataclass(frozen=True)
class AttentionArguments(ScriptArguments):
    """What to measure."""

    models: tuple[str, ...] = field(default=tuple(SHAPES), metadata={"help": "JSON list"})
    cases: tuple[str, ...] = field(default=(), metadata={"help": "JSON list of beginnings of cases; none: all"})
    tiles: tuple[tuple[int, ...], ...] = field(
        default=(), metadata={"help": "JSON list of tiles to compare; see GroupTiles and prefill_attention.Tiles"}
    )
    splits: tuple[tuple[int, ...], ...] = field(
        default=(), metadata={"help": "JSON list of ways to share cells of continued rows to compare; see Split"}
    )
    data_type: str = field(default="fp16", metadata={"help": "fp16 or bf16"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One case; parts of the read bandwidth and of the rate of a large product."""

    case: str
    tiles: str
    error: float
    us: float
    part_of_bandwidth: float | None
    part_of_rate: float | None
    split: str
    unsplit_us: float | None
    gain: float | None


class Work(NamedTuple):
    """A case: what runs on a layer's memory, what of it is compared, what is right, what it costs at least.

    Programs may share the cells of a block of continued rows: then ``run`` also takes how, see Split.
    """

    memories: Sequence[Tensor]
    run: Callable[..., Tensor]
    pick: Callable[[Tensor], Tensor]
    expected: Tensor
    read_bytes: float
    operations: float
    is_split: bool = False


def attended(q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, before: int) -> Tensor:
    """Attend in fp32 from q [H, T, D], at positions from ``before`` on, to [Hkv, before + T, D]; -> [H, T, D]."""
    out = []
    places = torch.arange(keys.shape[1], device=q.device)
    group = len(q) // len(keys)
    for head, query in enumerate(q.float()):
        scores = query @ keys[head // group].float().T * spec.scale
        if spec.softcap:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        distance = before + torch.arange(q.shape[1], device=q.device)[:, None] - places
        is_seen = (distance >= 0) & (distance < (spec.window or 1 << 30))
        out.append(scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ values[head // group].float())
    return torch.stack(out)


def visible(before: int, count: int, window: int) -> int:
    """Count the keys that ``count`` tokens behind ``before`` others see together."""
    most = window or 1 << 30
    return sum(min(before + place + 1, most) for place in range(count))


def make_decode(shape: Shape, rows: int, cached: int, dtype: torch.dtype, tiles: tuple[int, ...] | None) -> Work:
    """Prepare a decode step behind ``cached`` tokens."""
    from backends.fastertransformer.engine.ops.kernels.grouped_decode import GroupTiles, attend_groups
    from backends.fastertransformer.engine.ops.kernels.row_plan import plan_rows

    spec, memories, tables = _prepare(shape, rows, cached + 1, dtype)
    qkv = torch.randn(rows, shape.heads + 2 * shape.kv_heads, shape.size, device=_DEVICE).to(dtype)
    q, k, v = qkv[:, :, None].split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    positions, windows = (torch.full((rows,), each, device=_DEVICE) for each in (cached, 1 << 31))
    given, plan = GroupTiles(*tiles) if tiles else None, plan_rows(positions, windows)

    def run(memory: Tensor) -> Tensor:
        return attend_groups(q, k, v, memory, tables, plan, spec, tiles=given)

    assert spec.rotary
    turn = Rotation(positions[:, None], spec.rotary, torch.float32)
    expected = []
    for row in range(min(rows, 8)):
        keys, values = memories[0][:, tables[row].long()].transpose(1, 2).flatten(2, 3)[:, :, : cached + 1].float()
        keys[:, cached], values[:, cached] = turn(k.float())[row, :, 0].to(dtype), v[row, :, 0]
        expected.append(attended(turn(q.float())[row], keys, values, spec, cached))
    seen = rows * min(cached, shape.window or cached)
    read = 2 * seen * shape.kv_heads * shape.size * dtype.itemsize
    return Work(memories, run, lambda out: out[:8], torch.stack(expected), read, 4 * seen * shape.heads * shape.size)


def make_new(shape: Shape, rows: int, count: int, dtype: torch.dtype, tiles: tuple[int, ...] | None) -> Work:
    """Prepare attention of new rows to themselves."""
    from backends.fastertransformer.engine.ops.kernels.grouped_prefill import attend_group_rows
    from backends.fastertransformer.engine.ops.kernels.row_blocks import PackedRows

    spec = _prepare(shape, 1, 1, dtype)[0]
    given = None if tiles is None else (*tiles[:4], tiles[4] if len(tiles) > 4 else 0)
    drawn = torch.randn(4, rows * count, shape.heads + 2 * shape.kv_heads, shape.size, device=_DEVICE).to(dtype)
    parts = [shape.heads, shape.kv_heads, shape.kv_heads]
    ends = torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=_DEVICE)
    packed = PackedRows(ends, rows * count, count)

    def run(qkv: Tensor) -> Tensor:
        q, k, v = torch.split(qkv.transpose(0, 1), parts)
        return attend_group_rows(q, k, v, packed, spec, given)

    q, k, v = drawn[0, :count].transpose(0, 1).split(parts)
    operations = 4 * rows * visible(0, count, shape.window) * shape.heads * shape.size
    return Work([*drawn], run, lambda out: out[:, :count], attended(q, k, v, spec, 0), 0, operations)


def make_continued(
    shape: Shape, case: tuple[int, int, int, int, int], dtype: torch.dtype, tiles: tuple[int, ...] | None
) -> Work:
    """Prepare rows that continue what is cached, and others of one token."""
    from backends.fastertransformer.engine.ops.kernels.grouped_prefill import extend
    from backends.fastertransformer.engine.ops.kernels.kv_write import rotate_and_write
    from backends.fastertransformer.engine.ops.kernels.row_blocks import PackedRows, Split

    rows, cached, count, single, behind = case
    spec, memories, tables = _prepare(shape, rows + single, cached + count, dtype)
    given = None if tiles is None else (*tiles[:4], tiles[4] if len(tiles) > 4 else 0)
    counts = torch.tensor([count] * rows + [1] * single, device=_DEVICE)
    ends = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    slots = torch.arange(rows + single, device=_DEVICE).repeat_interleave(counts)
    before = torch.tensor([cached] * rows + [behind] * single, device=_DEVICE)
    positions = before[slots] + torch.arange(len(slots), device=_DEVICE) - ends[slots]
    qkv = torch.randn(len(slots), shape.heads + 2 * shape.kv_heads, shape.size, device=_DEVICE).to(dtype)
    parts = [shape.heads, shape.kv_heads, shape.kv_heads]
    q, k, v = qkv.transpose(0, 1).split(parts)
    places = tables[slots, positions // PAGE], positions % PAGE, positions
    rotate_and_write(q, k, v, memories[0], *places, spec.rotary)
    packed = PackedRows(ends, len(slots), cached + count, rows)

    def run(memory: Tensor, *split: int) -> Tensor:
        return extend(q, memory, tables, slots, positions, packed, spec, given, Split(*split))

    expected = []
    for row in (0, rows + single - 1):
        end = before[row] + counts[row]
        keys, values = memories[0][:, tables[row].long()].transpose(1, 2).flatten(2, 3)[:, :, :end]
        expected.append(attended(q[:, ends[row] : ends[row + 1]], keys, values, spec, int(before[row])))
    chosen = torch.cat([torch.arange(int(ends[row]), int(ends[row + 1])) for row in (0, rows + single - 1)])
    seen = rows * visible(cached, count, shape.window) + single * visible(behind, 1, shape.window)
    reach = (shape.window or 1 << 30) + count
    entries = rows * min(cached + count, reach) + single * min(behind + 1, reach)
    read = 2 * entries * shape.kv_heads * shape.size * dtype.itemsize
    operations = 4 * seen * shape.heads * shape.size
    return Work(memories, run, lambda out: out[:, chosen], torch.cat(expected, 1), read, operations, is_split=True)


def _prepare(shape: Shape, rows: int, entries: int, dtype: torch.dtype) -> tuple[AttentionSpec, list[Tensor], Tensor]:
    """Give a spec, the memory of several layers, and page tables of torn pages."""
    rotary = Rotary(shape.size, False, plain_frequencies(shape.size, 500_000.0, _DEVICE))
    spec = AttentionSpec(shape.size**-0.5, None, rotary, shape.softcap, shape.window)
    width = -(-entries // PAGE)
    layer = (2, rows * width + 1, shape.kv_heads, PAGE, shape.size)
    count = max(2, _ROTATED_BYTES // (2 * rows * width * PAGE * shape.kv_heads * shape.size * dtype.itemsize))
    memories = [torch.randn(layer, device=_DEVICE).to(dtype) for _ in range(min(32, count))]
    tables = (torch.randperm(rows * width, device=_DEVICE) + 1).view(rows, width).int()
    return spec, memories, tables


def cases_of(name: str, dtype: torch.dtype) -> dict[str, Callable[[tuple[int, ...] | None], Work]]:
    """Give a model's cases by name."""
    shape, cases = SHAPES[name], dict[str, Callable[[tuple[int, ...] | None], Work]]()
    for rows, cached in DECODED:
        cases[f"{name} {rows} x {cached}"] = partial(make_decode, shape, rows, cached, dtype)
    for rows, count in NEW:
        cases[f"{name} new {rows} x {count}"] = partial(make_new, shape, rows, count, dtype)
    for case in CONTINUED:
        rows, cached, count, single, behind = case
        of = f" of {behind}" if behind != cached else ""
        cases[f"{name} {rows} x {cached} + {count}, + {single}{of}"] = partial(make_continued, shape, case, dtype)
    return cases


def measure(arguments: AttentionArguments, table: Table, rates: Rates) -> None:
    """Fill the table.

    Raises:
        ArtefactError: a result is wrong.
    """
    dtype = TORCH_TYPES[arguments.data_type]
    made = [each for name in arguments.models for each in cases_of(name, dtype).items()]
    wanted = [each for each in made if not arguments.cases or each[0].startswith(arguments.cases)]
    for (name, make), tiles, split in product(wanted, arguments.tiles or (None,), arguments.splits or ((),)):
        torch.manual_seed(0)
        work = make(tiles)
        how = split if work.is_split else ()
        found = work.pick(work.run(work.memories[0], *how)).float()
        error = float((found - work.expected).norm() / work.expected.norm())
        us = time_graph([partial(work.run, memory, *how) for memory in work.memories])
        unsplit_us = time_graph([partial(work.run, memory, 0) for memory in work.memories]) if work.is_split else None
        read = work.read_bytes / rates.read_bytes / us * 1e6 if work.read_bytes else None
        rate = work.operations / rates.operations / us * 1e6 if "new" in name or "+" in name else None
        of_split = " ".join(map(str, how)), unsplit_us, unsplit_us and unsplit_us / us
        table.add(Row(name, " ".join(map(str, tiles or ())), error, us, read, rate, *of_split))
        if not error < LIMITS[arguments.data_type]:
            limit = LIMITS[arguments.data_type]
            raise ArtefactError(f"{name}: relative error {error:.2g}", f"at most {limit} is right")


@torch.inference_mode()
def main(argv: Sequence[str]) -> None:
    """Measure."""
    arguments = AttentionArguments.from_argv(argv, description=__doc__)
    need_gpu()
    rates = measure_rates(arguments.data_type)
    print(f"reads {rates.read_bytes / 1e12:.4f} TB/s, multiplies at {rates.operations / 1e12:.0f} TFLOP/s", flush=True)
    measure(arguments, Table(arguments.csv, arguments.commit), rates)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu.attention"))
