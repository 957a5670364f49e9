"""Time the loading of shards onto a GPU, against what its link carries, and against safetensors' load_file.

    python3 -m benchmarks.gpu.weights --size=20B --directory=/dev/shm/shards
    python3 -m benchmarks.gpu.weights --checkpoint=llama-2-7b --tensor-para-size=2

With --checkpoint, a directory of Hugging Face's, its shards are written and both are loaded by turns: all of it, or
with --tensor-para-size what each of the first and the last rank reads. Where config.json lies alone, weights are made
up.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

import models
from backends.fastertransformer.engine.model.families import read_config
from backends.fastertransformer.engine.model.precision import TORCH_TYPES, choose_precision
from backends.fastertransformer.engine.model.reader import Reader
from backends.fastertransformer.engine.model.shards import Piece, planned
from backends.fastertransformer.engine.model.weights import load_weights, read_model
from backends.fastertransformer.engine.parallel.partition import Partition
from benchmarks.gpu.models import Table, find_size, median_seconds, need_gpu, tidy
from export_scripts.arguments import ConvertArguments
from export_scripts.convert import convert
from ft_format.location import is_hub_directory
from ft_format.weight_format import find_format
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
    checkpoint: Path | None = field(default=None, metadata={"help": "a directory of Hugging Face's, in place of size"})
    tensor_para_size: int = field(default=1, metadata={"help": "ranks of the checkpoint"})
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


@dataclass(frozen=True)
class Turn:
    """What one rank reads, of shards and of the directory that they were made of."""

    checkpoint: str
    data_type: str
    rank: str
    load: int
    gigabytes: float
    shards_gigabytes_per_s: float
    directory_gigabytes_per_s: float
    ratio: float


def write_shards(arguments: WeightsArguments) -> int:
    """Write every shard of the model, random numbers over and over, and the peer's file -> bytes of the shards."""
    directory, device = arguments.directory, torch.device("cpu")
    directory.mkdir(parents=True)
    find_size(arguments.size).write(directory, arguments.weight_data_type)
    if is_hub_directory(directory):
        raise ConfigError(f"random shards of {arguments.size} are not made", "take a size of a GPT")
    config, order = read_config(directory), list[Piece]()
    source_type = TORCH_TYPES[arguments.weight_data_type]
    precision, partition = choose_precision("fp32", device), Partition(range(config.num_layer))
    plan = Reader(config, 1, precision, torch.device("meta"), False, None, planned(order))
    read_model(plan, config, partition, False)
    places = [(directory / piece.file, 0, piece.size_bytes) for piece in order]
    if arguments.peer != "none":
        places += lay_out(directory / _PEER_FILE, {piece.file: piece.shape for piece in order}, source_type)
    write_random(places, source_type)
    return sum(piece.size_bytes for piece in order)


def lay_out(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> list[tuple[Path, int, int]]:
    """Write the header of a file of safetensors -> for each tensor the file, its first byte and its size."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes.values()]
    ends = list(accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    name = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}[dtype]
    entries = {
        tensor: {"dtype": name, "shape": shape, "data_offsets": [start, end]}
        for (tensor, shape), start, end in zip(shapes.items(), starts, ends, strict=True)
    }
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    first = 8 + len(header)
    return [(path, first + start, size) for start, size in zip(starts, sizes, strict=True)]


def write_random(places: Iterable[tuple[Path, int, int]], dtype: torch.dtype) -> None:
    """Write random numbers, the same ones over and over."""
    numbers = torch.randn(_BLOCK_BYTES // dtype.itemsize).mul_(0.02).to(dtype)
    block = numbers.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy().view(np.uint8).data

    def write(path: Path, start: int, size: int) -> None:
        target = os.open(path, os.O_WRONLY | os.O_CREAT)
        for done in range(0, size, _BLOCK_BYTES):
            os.pwrite(target, block[: size - done], start + done)
        os.close(target)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda place: write(*place), places))


def with_weights(checkpoint: Path, made: Path, dtype: torch.dtype) -> Path:
    """Return the checkpoint, or a directory with its configuration and made-up weights where it has none."""
    if any(checkpoint.glob("*.safetensors")):
        return checkpoint
    made.mkdir(parents=True)
    shutil.copy(checkpoint / "config.json", made)
    said = json.loads((made / "config.json").read_text())
    shapes = {name: each.shape for name, each in models.find(said["model_type"]).read(said).tensors().items()}
    write_random(lay_out(made / "model.safetensors", shapes, dtype), dtype)
    return made


def load_by_turns(arguments: WeightsArguments, checkpoint: Path, table: Table) -> None:
    """Write the shards of a directory, and load both."""
    ranks, device = arguments.tensor_para_size, torch.device("cuda")
    directory = arguments.directory
    hub = with_weights(checkpoint, directory / "huggingface", TORCH_TYPES[arguments.weight_data_type])
    shards = directory / f"{ranks}-gpu"
    convert(ConvertArguments(hub, shards, ranks, arguments.weight_data_type, processes=16))
    precision = choose_precision(arguments.data_type, device, find_format(arguments.int8_mode))

    def load(path: Path, rank: int) -> tuple[float, int]:
        config = read_config(path, "Llama", ranks)
        partition, found = Partition(range(config.num_layer), rank if ranks > 1 else None), list[int]()

        def once() -> None:
            found.append(load_weights(path, config, ranks, precision, device, partition).size_bytes)

        return seconds_of(once), found[0]

    for rank in sorted({0, ranks - 1}):
        for index in range(arguments.repeats):
            (of_shards, size), (of_hub, _) = load(shards, rank), load(hub, rank)
            rates = size / of_shards / 1e9, size / of_hub / 1e9
            what = (str(checkpoint), arguments.data_type, f"{rank} of {ranks}", index + 1)
            table.add(Turn(*what, size / 1e9, *rates, rates[1] / rates[0]))


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
    precision = choose_precision(arguments.data_type, device, find_format(arguments.int8_mode))
    table = Table(arguments.csv, arguments.commit)
    try:
        if arguments.checkpoint:
            load_by_turns(arguments, arguments.checkpoint, table)
            return
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
    raise SystemExit(exit_status(main, "benchmarks.gpu.weights"))
