r"""Time a server's start from files that no memory holds: until its first answer, beside vLLM and beside the disk.

    python3 -m benchmarks.serving.cold_start --size="Llama 3.1 8B" --directory=/path/on/the/disk --csv=cold_start.csv \
        --peer='["vllm", "serve"]' --loaders='["auto", "fastsafetensors", "runai_streamer"]'

Random weights of the shape are converted to a Hugging Face directory on the disk, and a model repository of hard links
to it: every side reads the same bytes. By turns the files leave the page cache, and a side starts: ``disk`` reads them
once by several threads, past the page cache; ``slipway`` is ``deployment.serve``, which proves every file by its digest
and waits for a real generation; a peer is its own server program with ``--load-format``. Seconds are from the start of
the process to an answer of a token over HTTP. The share is that of the disk's rate which the time until then reaches,
all of the start counted in; ``read_gb`` is what the machine's disks were asked for meanwhile.

Libraries leave the page cache too where ``/proc/sys/vm/drop_caches`` can be written, as root can; elsewhere the model's
files alone do.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

import models
from backends.fastertransformer.engine.model.precision import TORCH_TYPES
from benchmarks.gpu.models import Table
from benchmarks.gpu.sizes import LlamaSize, find_size
from deployment.arguments import ServeArguments
from export_scripts.arguments import HUGGINGFACE, ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from export_scripts.repository.names import ENGINE
from handover.arguments import ScriptArguments
from handover.endpoint import Endpoint
from handover.errors import ConfigError, ServerError, exit_status
from models.directory import CONFIG_FILE

_SLIPWAY, _DISK = "slipway", "disk"
_NAME = "fastertransformer"
_DROP = Path("/proc/sys/vm/drop_caches")
_FILE_BYTES, _BLOCK_BYTES, _READERS = 5_000_000_000, 16 << 20, 16
_RANDOM = 1 << 26
_PROMPT, _POLL_S = list(range(40, 56)), 0.05


@dataclass(frozen=True)
class ColdStartArguments(ScriptArguments):
    """What to start."""

    size: str = field(default="Llama 3.1 8B", metadata={"help": "shape, a Llama's"})
    data_type: str = field(default="bf16", metadata={"help": "of the weights and the computation"})
    directory: Path = field(default=Path("/tmp"), metadata={"help": "on the disk: takes the model once"})
    scratch: Path = field(default=Path("/dev/shm"), metadata={"help": "holds the random weights before: once more"})
    tensor_para_size: int = field(default=1, metadata={"help": "GPUs that share a layer"})
    kv_cache_bytes: int = field(default=1 << 33, metadata={"help": "of our server"})
    peer: tuple[str, ...] = field(default=(), metadata={"help": "JSON list: vLLM's program and first words"})
    peer_args: tuple[str, ...] = field(default=(), metadata={"help": "JSON list: more of its flags"})
    loaders: tuple[str, ...] = field(default=("auto",), metadata={"help": "JSON list: its --load-format, a side each"})
    rounds: int = field(default=1, metadata={"help": "turns of each side"})
    timeout_s: float = field(default=900, metadata={"help": "seconds until a server must have answered"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})
    commit: str = field(default="", metadata={"help": "what is measured, for the file"})


@dataclass(frozen=True)
class Row:
    """One start: ``gigabytes`` are the model's files, ``read_gb`` what disks were asked for."""

    side: str
    gigabytes: float
    seconds: float
    read_gb: float
    gigabytes_per_s: float
    of_disk: float | None


def main(argv: Sequence[str]) -> None:
    """Print a row a start, and how our time stands to each peer's."""
    arguments = ColdStartArguments.from_argv(argv, __doc__)
    table = Table(arguments.csv, arguments.commit)
    with ExitStack() as stack:
        place, scratch = (
            Path(stack.enter_context(tempfile.TemporaryDirectory(dir=each, prefix="slipway-cold-")))
            for each in (arguments.directory, arguments.scratch)
        )
        model, repository = make_model(arguments, place, scratch)
        files = sorted(model.glob("*.safetensors"))
        size = sum(each.stat().st_size for each in files)
        sides: dict[str, Callable[[], float]] = {
            _DISK: partial(read_all, files, size),
            _SLIPWAY: partial(start_own, arguments, repository, place),
        }
        for loader in arguments.loaders if arguments.peer else ():
            sides[f"vllm {loader}"] = partial(start_peer, arguments, model, loader, place)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(arguments.rounds):
            for name, start in sides.items():
                forget(files)
                before = read_bytes()
                seconds[name].append(start())
                read, took = read_bytes() - before, seconds[name][-1]
                share = None if name == _DISK else statistics.median(seconds[_DISK]) / took
                table.add(Row(name, size / 1e9, took, read / 1e9, size / took / 1e9, share))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    for name in medians.keys() - {_DISK, _SLIPWAY}:
        print(f"slipway / {name}: {medians[_SLIPWAY] / medians[name]:.3f} of its time")


def make_model(arguments: ColdStartArguments, place: Path, scratch: Path) -> tuple[Path, Path]:
    """Write the random weights, convert them, and link the repository: the directory of Hugging Face, and ours.

    Raises:
        ConfigError: the shape is no Llama's.
    """
    size = find_size(arguments.size)
    if not isinstance(size, LlamaSize):
        raise ConfigError(f"'{arguments.size}' is no Llama's shape", "take one of those")
    source, model, repository = scratch / "source", place / "model", place / "repository"
    source.mkdir()
    said = size.config(arguments.data_type)
    (source / CONFIG_FILE).write_text(json.dumps(said))
    for number, tensors in enumerate(_parts(said, TORCH_TYPES[arguments.data_type])):
        save_file(tensors, source / f"model-{number:05}.safetensors")
    index = {name: f"model-{n:05}.safetensors" for n, part in enumerate(_shares(said)) for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    Tokenizer(BPE({chr(33 + each): each for each in range(90)}, [])).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    convert(ConvertArguments(source, model, 1, arguments.data_type, processes=8, format=HUGGINGFACE))
    shutil.rmtree(source)
    build_repository(
        ExportArguments(
            model, repository, ENGINE, arguments.tensor_para_size, 1, arguments.data_type, 0, 0, 64, decoupled=True
        )  # fmt: skip
    )
    with (repository / ENGINE / "config.pbtxt").open("a", encoding="utf-8") as config:
        config.write(f'parameters {{ key: "kv_cache_bytes" value {{ string_value: "{arguments.kv_cache_bytes}" }} }}\n')
    os.sync()
    return model, repository


def _shares(said: dict[str, object]) -> list[dict[str, tuple[int, ...]]]:
    """Return the tensors' shapes by file."""
    shares, used = [dict[str, tuple[int, ...]]()], 0
    for name, tensor in models.find(str(said["model_type"])).read(said).tensors().items():
        count = 1
        for each in tensor.shape:
            count *= each
        if used and used + 2 * count > _FILE_BYTES:
            shares, used = [*shares, {}], 0
        shares[-1][name], used = tuple(tensor.shape), used + 2 * count
    return shares


def _parts(said: dict[str, object], data_type: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of each file: norms of ones, and matrices that repeat the same random numbers."""
    numbers = (0.02 * torch.randn(_RANDOM, generator=torch.Generator().manual_seed(0))).to(data_type)
    for share in _shares(said):
        tensors = {}
        for name, shape in share.items():
            if len(shape) == 1:
                tensors[name] = torch.ones(shape, dtype=data_type)
                continue
            count = shape[0] * shape[1]
            tensors[name] = numbers.repeat(-(-count // _RANDOM))[:count].view(shape)
        yield tensors


def forget(files: Sequence[Path]) -> None:
    """Drop files from the page cache, and everything else where that is allowed."""
    for each in files:
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    with suppress(OSError):
        _DROP.write_text("3")


def read_bytes() -> int:
    """Return what the whole disks of this machine have read since it started."""
    lines = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
    return 512 * sum(int(words[5]) for words in lines if Path("/sys/block", words[2], "device").exists())


def read_all(files: Sequence[Path], size: int) -> float:
    """Read files once, past the page cache, by several threads: seconds."""
    blocks = [(path, start) for path in files for start in range(0, path.stat().st_size, _BLOCK_BYTES)]

    def read(block: tuple[Path, int]) -> int:
        descriptor = os.open(block[0], os.O_RDONLY | getattr(os, "O_DIRECT", 0))
        try:
            with mmap.mmap(-1, _BLOCK_BYTES) as memory:
                return os.preadv(descriptor, [memory], block[1])
        finally:
            os.close(descriptor)

    began = time.perf_counter()
    with ThreadPoolExecutor(_READERS) as readers:
        done = sum(readers.map(read, blocks))
    if done != size:
        raise ServerError(f"{done} of {size} bytes were read")
    return time.perf_counter() - began


def start_own(arguments: ColdStartArguments, repository: Path, place: Path) -> float:
    """Start our server, and stop it once it has answered: seconds until then."""
    endpoint = place / "endpoint.json"
    edited = (f"{ENGINE}/config.pbtxt",)  # it says the cache's size
    given = ServeArguments(
        *(repository, endpoint, place / "server.log"),
        openai_port=0, start_timeout_s=arguments.timeout_s, edited_files=edited,
    )  # fmt: skip

    def answers() -> bool:
        return endpoint.exists() and ask(f"http://127.0.0.1:{Endpoint.read(endpoint).openai_port}", _NAME)

    return _until([sys.executable, "-m", "deployment.serve", *given.to_argv()], answers, arguments.timeout_s, place)


def start_peer(arguments: ColdStartArguments, model: Path, loader: str, place: Path) -> float:
    """Start vLLM, and stop it once it has answered: seconds until then."""
    port = 20000 + os.getpid() % 20000
    command = [*arguments.peer, str(model), f"--port={port}", "--host=127.0.0.1", f"--served-model-name={_NAME}",
               f"--tensor-parallel-size={arguments.tensor_para_size}", f"--load-format={loader}",
               "--max-model-len=4096", *arguments.peer_args]  # fmt: skip
    return _until(command, lambda: ask(f"http://127.0.0.1:{port}", _NAME), arguments.timeout_s, place)


def _until(command: Sequence[str], answers: Callable[[], bool], timeout_s: float, place: Path) -> float:
    """Run a server until it answers: seconds from its start.

    Raises:
        ServerError: it ended, or takes longer than ``timeout_s``; with the end of what it printed.
    """
    log = place / "started.log"
    with log.open("w") as file:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while not answers():
                if process.poll() is not None or time.perf_counter() - began > timeout_s:
                    tail = log.read_text(errors="replace")[-2000:]
                    raise ServerError(f"{command[0]} has not answered after {timeout_s:g} s, or ended: {tail}")
                time.sleep(_POLL_S)
            took = time.perf_counter() - began
            sys.stderr.write(log.read_text(errors="replace"))
            return took
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ask(url: str, model: str) -> bool:
    """Ask for a token; return whether it came."""
    body = json.dumps({"model": model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True})
    request = urllib.request.Request(f"{url}/v1/completions", body.encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(json.load(answer)["choices"])
    except OSError:
        return False


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "cold_start"))
