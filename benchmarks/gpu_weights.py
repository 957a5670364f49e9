"""Time the loading of shards onto a GPU, against what its link carries, and against safetensors' load_file.

    python3 -m benchmarks.gpu_weights --size=20B --directory=/dev/shm/shards

Random shards of that model are written to the directory first, and a safetensors file with the same tensors, and
removed afterwards. They are in the host's memory then, as those of a model that was served before, or just converted:
this measures the way from there, not a disk. What a process needs to use a GPU at all is done before; the first load of
a process has its pinned memory made, too.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.precision import TORCH_TYPES, choose_precision
from backends.fastertransformer.engine.model.reader import Reader
from backends.fastertransformer.engine.model.shards import planned
from backends.fastertransformer.engine.model.weights import load_weights, read_model
from backends.fastertransformer.engine.parallel.partition import Partition
from benchmarks.gpu_models import Table, find_size, median_seconds, need_gpu, tidy
from handover.arguments import ScriptArguments
from handover.errors import ConfigError, exit_status

_PROBE_BYTES = 1 << 30
_BLOCK_BYTES = 64 << 20
_PEER_FILE = "peer.safetensors"


@dataclass(frozen=True)
class WeightsArguments(ScriptArguments):
    """What to load."""

    size: str = field(default="20B", metadata={"help": "model"})
    directory: Path = field(default=Path("/dev/shm/slipway-shards"), metadata={"help": "is made, and removed"})
    weight_data_type: str = field(default="fp16", metadata={"help": "of the shards"})
    data_type: str = field(default="fp16", metadata={"help": "of the computation"})
    int8_mode: int = field(default=0, metadata={"help": "of the engine"})
    repeats: int = field(default=2, metadata={"help": "times to load; each is reported"})
    peer: str = field(default="safetensors", metadata={"help": "or none; takes the directory as much again"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One loading."""

    model: str
    weight_data_type: str
    data_type: str
    load: int
    gigabytes: float
    seconds: float
    gigabytes_per_s: float
    link_gigabytes_per_s: float
    part_of_link: float
    peer_seconds: float | None
    peer_ratio: float | None


def write_shards(arguments: WeightsArguments) -> int:
    """Write every shard of the model, random numbers over and over, and the peer's file -> bytes of the shards."""
    directory, device = arguments.directory, torch.device("cpu")
    directory.mkdir(parents=True)
    text = find_size(arguments.size).config_ini() + f"weight_data_type = {arguments.weight_data_type}\n"
    (directory / "config.ini").write_text(text)
    config, order = read_config(directory), list[tuple[str, tuple[int, ...]]]()
    source_type = TORCH_TYPES[arguments.weight_data_type]
    precision, partition = choose_precision("fp32", device), Partition(range(config.num_layer))
    plan = Reader(config, 1, precision, torch.device("meta"), False, None, planned(source_type, order))
    read_model(plan, config, partition, False)
    numbers = torch.randn(_BLOCK_BYTES // source_type.itemsize).mul_(0.02).to(source_type)
    block = numbers.view(torch.int16 if source_type.itemsize == 2 else torch.int32).numpy().view(np.uint8).data

    sizes = [torch.Size(shape).numel() * source_type.itemsize for _, shape in order]
    places = [(directory / file, 0, size) for (file, _), size in zip(order, sizes, strict=True)]
    if arguments.peer != "none":
        ends = list(accumulate(sizes))
        starts = [end - size for end, size in zip(ends, sizes, strict=True)]
        name = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}[source_type]
        entries = {
            file: {"dtype": name, "shape": shape, "data_offsets": [start, end]}
            for (file, shape), start, end in zip(order, starts, ends, strict=True)
        }
        header = json.dumps(entries).encode()
        (directory / _PEER_FILE).write_bytes(len(header).to_bytes(8, "little") + header)
        first = 8 + len(header)
        places += [(directory / _PEER_FILE, first + start, size) for start, size in zip(starts, sizes, strict=True)]

    def write(path: Path, start: int, size: int) -> None:
        target = os.open(path, os.O_WRONLY | os.O_CREAT)
        for done in range(0, size, _BLOCK_BYTES):
            os.pwrite(target, block[: size - done], start + done)
        os.close(target)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda place: write(*place), places))
    return sum(sizes)


def link_bytes_per_s() -> float:
    """Copy 1 GiB of pinned memory to the GPU."""
    source = torch.empty(_PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device="cuda")
    return _PROBE_BYTES / median_seconds(partial(target.copy_, source, non_blocking=True), 5)


def seconds_of(load: Callable[[], object]) -> float:
    """Time a load whose result is dropped, after what was loaded before it has been freed."""
    tidy()
    start = time.perf_counter()
    load()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def time_peer(arguments: WeightsArguments) -> list[float]:
    """Time safetensors, as often as the engine."""
    if arguments.peer == "none":
        return []
    from safetensors.torch import load_file

    load = partial(load_file, arguments.directory / _PEER_FILE, device="cuda")
    return [seconds_of(load) for _ in range(arguments.repeats)]


def main(argv: Sequence[str]) -> None:
    """Write, load, remove."""
    arguments = WeightsArguments.from_argv(argv, description=__doc__)
    need_gpu()
    if arguments.peer not in ("safetensors", "none"):
        raise ConfigError(f"peer {arguments.peer}", "it is safetensors or none")
    if arguments.directory.exists():
        raise ConfigError(f"{arguments.directory} exists already", "name a directory that is not there: it is removed")
    device, link = torch.device("cuda"), link_bytes_per_s()
    precision = choose_precision(arguments.data_type, device, arguments.int8_mode)
    table = Table(arguments.csv, arguments.commit)
    try:
        size_bytes = write_shards(arguments)
        config = read_config(arguments.directory)
        theirs = time_peer(arguments)
        for index in range(arguments.repeats):
            seconds = seconds_of(lambda: load_weights(arguments.directory, config, 1, precision, device))
            rate, peer = size_bytes / seconds, theirs[index] if theirs else None
            formats = (arguments.weight_data_type, arguments.data_type + "+int8" * arguments.int8_mode)
            figures = (size_bytes / 1e9, seconds, rate / 1e9, link / 1e9, rate / link)
            table.add(Row(arguments.size, *formats, index + 1, *figures, peer, peer / seconds if peer else None))
    finally:
        shutil.rmtree(arguments.directory, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.gpu_weights"))
