"""Stream a large made-up checkpoint to its end as the reference of ``evaluation=divergence``: time and memory.

    python3 -m benchmarks.parity.large_reference --directory=/tmp/large --layers=2      # an estimate
    python3 -m benchmarks.parity.large_reference --directory=/tmp/large --kill-at=40    # Llama 3 70B, killed on the way

The files are safetensors of the right shapes. Embedding, head and norms are random; of each other tensor 64 KiB in
2 MiB are, and the rest is a hole, which takes no room on the disk: 141 GB in 9. Every byte is read, for the digest and
for the layers, and computed with; what a disk takes to read 141 GB is not in the figures. Passages are drawn, and cut
as texts are.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.convert.speed import MemorySampler, cpu_s
from benchmarks.parity.divergence_rows import write_rows
from evaluation.divergence.corpus import make_passages
from evaluation.divergence.reference import open_reference
from evaluation.divergence.stage import Ids, Numbers
from export_scripts.checkpoints.user_files import NOTHING_GIVEN
from handover.arguments import ScriptArguments
from handover.errors import exit_status
from models.described import read_directory

_LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BYTES, _FILE_BYTES = 2, 4_000_000_000  # of a number, and of a file
_RUN_BYTES, _EVERY_BYTES = 1 << 16, 1 << 21  # of what is not a hole, and from where one begins to the next
_WHOLE = ("embed_tokens", "lm_head", "norm")
_POOL = 33_554_467  # random numbers that are written again and again: a prime, so that no two rows of a matrix are one
_CHILD, _DONE = "--child", "done.json"
_EVERY_S = 1.0


@dataclass(frozen=True)
class LargeArguments(ScriptArguments):
    """What is streamed."""

    directory: Path = field(metadata={"help": "directory for the checkpoint and its reference"})
    layers: int = field(default=80, metadata={"help": "of the network"})
    samples: int = field(default=8, metadata={"help": "passages: 8 of 256 tokens at most are 960 tokens"})
    longest_passage: int = field(default=256, metadata={"help": "tokens of the longest; others are shorter"})
    kill_at: int = field(default=0, metadata={"help": "layer behind which the first run is killed; 0: it is not"})
    csv: Path | None = field(default=None, metadata={"help": "file to write"})


@dataclass(frozen=True)
class Run:
    """A process that streamed, or was killed meanwhile.

    Attributes:
        first: stages that were whole when it began.
        last: when it ended; all are a layer more than two.
        seconds: by the clock, digest included.
        processor_s: of all its processes, as memory is.
        peak_gb: with pages of files that are mapped.
        own_gb: without them.
        disk_gb: that came from the disk and not from its cache.
    """

    layers: int
    billion_numbers: float
    tokens: int
    first: int
    last: int
    seconds: float
    processor_s: float
    peak_gb: float
    own_gb: float
    disk_gb: float
    ended: str


def main(argv: Sequence[str]) -> None:
    """Make the files, stream, and print a line for each process."""
    if argv[:1] == [_CHILD]:
        _stream(LargeArguments.from_argv(argv[1:], description=__doc__))
        return
    arguments = LargeArguments.from_argv(argv, description=__doc__)
    model, rows = arguments.directory / "model", list[Run]()
    if not model.is_dir():
        make(model, arguments.layers)
    killing = (arguments.kill_at, 0) if arguments.kill_at else (0,)
    for kill_at in killing:
        row = _measure(arguments, kill_at)
        rows.append(row)
        sys.stdout.write(", ".join(f"{name} {value}" for name, value in asdict(row).items()) + "\n")
        sys.stdout.flush()
    write_rows(arguments.csv, rows)


def _stream(arguments: LargeArguments) -> None:
    """Score the passages, and print what they are in short."""
    reference = open_reference(arguments.directory / "model", arguments.directory / "references", NOTHING_GIVEN)
    sys.stderr.write(f"{reference.digest}\n")
    scores = reference.scores(_passages(arguments), 64, Numbers())
    means = f"mean log probability {scores.log_probs.mean():.6f}, of the best {scores.top[:, 0].mean():.6f}"
    sys.stderr.write(f"{means}, sha256 {hashlib.sha256(scores.top.tobytes()).hexdigest()}\n")


def _passages(arguments: LargeArguments) -> list[Ids]:
    drawn = np.random.default_rng(0).integers(3, _LLAMA_70B["vocab_size"], 1 << 20)
    return make_passages([tuple(drawn.tolist())], None, arguments.longest_passage, arguments.samples, 1 << 30)


def _measure(arguments: LargeArguments, kill_at: int) -> Run:
    """Run a process to its end, or kill it behind a layer."""
    begin, first = time.monotonic(), _stages(arguments.directory)
    argv = [sys.executable, "-m", "benchmarks.parity.large_reference", _CHILD, *arguments.to_argv()]
    spent, read, killed = 0.0, 0, False
    with subprocess.Popen(argv) as process, MemorySampler(process.pid, _EVERY_S) as memory:
        while process.poll() is None:
            spent, read = max(spent, cpu_s(process.pid)), max(read, _read_bytes(process.pid))
            if kill_at and not killed and _stages(arguments.directory) > kill_at:
                time.sleep(_EVERY_S)  # into the next layer
                process.kill()
                killed = True
            time.sleep(_EVERY_S / 4)
    last = _stages(arguments.directory) if killed else arguments.layers + 2
    if process.returncode and not killed:
        raise RuntimeError(f"it ended with {process.returncode}")
    return Run(
        arguments.layers,
        round(sum(prod(shape) for shape in _shapes(arguments.directory / "model").values()) / 1e9, 2),
        sum(map(len, _passages(arguments))),
        first,
        last,
        round(time.monotonic() - begin),
        round(spent),
        round(memory.peak_bytes / 1e9, 2),
        round(memory.peak_private_bytes / 1e9, 2),
        round(read / 1e9, 2),
        "killed" if killed else "whole",
    )


def _stages(directory: Path) -> int:
    """Return how many stages a run that is under way has behind it."""
    found = [json.loads(file.read_text())["stages"] for file in directory.glob(f"references/*/*/work/{_DONE}")]
    return int(max(found, default=0))


def _read_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines).get("read_bytes", 0))


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return {name: each.shape for name, each in read_directory(directory, RuntimeError).decoder.tensors().items()}


def make(directory: Path, layers: int) -> None:
    """Write config.json, files of safetensors with holes, and their index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(_LLAMA_70B | {"num_hidden_layers": layers}))
    files: list[dict[str, tuple[int, ...]]] = [{}]
    sizes = [0]
    for name, shape in _shapes(directory).items():
        if sizes[-1] > _FILE_BYTES:
            files.append({})
            sizes.append(0)
        files[-1][name] = shape
        sizes[-1] += _BYTES * prod(shape)
    names = [f"model-{number:05}.safetensors" for number in range(len(files))]
    pool = 0.02 * np.random.default_rng(1).standard_normal(_POOL, np.float32)
    for file, tensors in zip(names, files, strict=True):
        _write(directory / file, tensors, pool)
    index = {name: file for file, tensors in zip(names, files, strict=True) for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _write(path: Path, tensors: dict[str, tuple[int, ...]], pool: npt.NDArray[np.float32]) -> None:
    begin, header = 0, {}
    for name, shape in tensors.items():
        end = begin + _BYTES * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    numbers, around_one = (((pool + np.float32(mean)).view(np.uint32) >> 16).astype(np.uint16) for mean in (0, 1))
    drawn = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + begin)
        for name, (begin, end) in {name: each["data_offsets"] for name, each in header.items()}.items():
            is_whole = any(each in name for each in _WHOLE)
            source, every = around_one if "norm" in name else numbers, _RUN_BYTES if is_whole else _EVERY_BYTES
            for place in range(begin, end, every):
                run = min(_RUN_BYTES, end - place) // _BYTES
                drawn = drawn if drawn + run <= _POOL else drawn + run - _POOL
                file.seek(8 + len(text) + place)
                file.write(source[drawn : drawn + run].tobytes())
                drawn += run


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "large_reference"))
