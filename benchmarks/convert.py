"""Time the conversion against ``cp`` of the same bytes, in alternation, and measure its memory.

    python3 -m benchmarks.convert                                 # about 0.7 GB
    python3 -m benchmarks.convert --layers=24 --hidden=2048       # 2.6 GB, 1.3 B parameters

The checkpoint is made up: random weights of a GPT in NeMo's legacy form. Both sides start with a warm page cache and
an idle disk, and end with their bytes in the page cache.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from handover.arguments import ScriptArguments
from handover.errors import exit_status
from handover.progress import human_bytes

_SAMPLE_EVERY_S = 0.01


@dataclass(frozen=True)
class BenchmarkArguments(ScriptArguments):
    """The shape of the checkpoint and how often to measure."""

    layers: int = field(default=12, metadata={"help": "transformer blocks"})
    hidden: int = field(default=1536, metadata={"help": "width; heads are 64 wide"})
    vocab: int = field(default=50304, metadata={"help": "rows of the embedding"})
    source_data_type: str = field(default="fp16", metadata={"help": "fp32, fp16 or bf16, in the checkpoint"})
    weight_data_type: str = field(default="fp16", metadata={"help": "fp32, fp16 or bf16, in the shards"})
    tensor_para_size: int = field(default=8, metadata={"help": "ranks to split for"})
    processes: int = field(default=2, metadata={"help": "parallel workers"})
    repeats: int = field(default=3, metadata={"help": "measurements of each side"})
    directory: Path | None = field(default=None, metadata={"help": "where to work; default: the temporary directory"})


def write_checkpoint(arguments: BenchmarkArguments, path: Path) -> None:
    """Write a NeMo archive of random weights."""
    import torch

    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[arguments.source_data_type]
    hidden = arguments.hidden

    def random(*shape: int) -> torch.Tensor:
        return (torch.rand(shape) - 0.5).to(dtype)

    model = "model.language_model."
    state = {
        f"{model}embedding.word_embeddings.weight": random(arguments.vocab, hidden),
        f"{model}embedding.position_embeddings.weight": random(2048, hidden),
        f"{model}encoder.final_layernorm.weight": random(hidden),
        f"{model}encoder.final_layernorm.bias": random(hidden),
    }
    for layer in range(arguments.layers):
        for name, rows, columns in (
            ("self_attention.query_key_value", 3 * hidden, hidden),
            ("self_attention.dense", hidden, hidden),
            ("mlp.dense_h_to_4h", 4 * hidden, hidden),
            ("mlp.dense_4h_to_h", hidden, 4 * hidden),
        ):
            state[f"{model}encoder.layers.{layer}.{name}.weight"] = random(rows, columns)
            state[f"{model}encoder.layers.{layer}.{name}.bias"] = random(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            state[f"{model}encoder.layers.{layer}.{name}.weight"] = random(hidden)
            state[f"{model}encoder.layers.{layer}.{name}.bias"] = random(hidden)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        root = Path(folder)
        torch.save(state, root / "model_weights.ckpt")
        (root / "vocab.json").write_text('{"<|endoftext|>": 0}')
        (root / "merges.txt").write_text("#version: 0.2\n")
        (root / "model_config.yaml").write_text(
            f"num_layers: {arguments.layers}\nhidden_size: {hidden}\nffn_hidden_size: {4 * hidden}\n"
            f"num_attention_heads: {hidden // 64}\nmax_position_embeddings: 2048\n"
            "tokenizer: {library: megatron, type: GPT2BPETokenizer, vocab_file: 'nemo:vocab.json', "
            "merge_file: 'nemo:merges.txt'}\n"
        )
        with tarfile.open(path, "w") as tar:
            tar.add(root, arcname=".")


class MemorySampler:
    """Sum the memory of a process and its descendants, every few milliseconds, and keep the peaks.

    Attributes:
        peak_bytes: of resident memory, mapped file pages included.
        peak_private_bytes: of anonymous memory alone.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self.peak_private_bytes = 0
        self._pid = pid
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_EVERY_S):
            sizes = [_memory(pid) for pid in _tree(self._pid)]
            self.peak_bytes = max(self.peak_bytes, sum(total for total, _ in sizes))
            self.peak_private_bytes = max(self.peak_private_bytes, sum(private for _, private in sizes))


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(descendant for child in children for descendant in _tree(int(child)))]


def _memory(pid: int) -> tuple[int, int]:
    """Resident and anonymous bytes of one process; nothing if it just ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "RssAnon"))}
    return sizes.get("VmRSS", 0), sizes.get("RssAnon", 0)


@dataclass(frozen=True)
class Measurement:
    """One run of a command.

    Attributes:
        elapsed_s: wall-clock time.
        cpu_s: processor time of all its processes: what a busy machine does not distort.
        memory: its peaks.
    """

    elapsed_s: float
    cpu_s: float
    memory: MemorySampler

    def __str__(self) -> str:
        return f"{self.elapsed_s:6.2f} s ({self.cpu_s:5.2f} s of processor)"


def _measure(argv: Sequence[str]) -> Measurement:
    """Run a command with nothing left to write back from before."""
    os.sync()
    cpu_s = _children_cpu_s()
    started = time.monotonic()
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    with MemorySampler(process.pid) as memory:
        status = process.wait()
    elapsed_s = time.monotonic() - started
    if status:
        raise RuntimeError(f"{argv[0]} ended with status {status}")
    return Measurement(elapsed_s, _children_cpu_s() - cpu_s, memory)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare(arguments: BenchmarkArguments, folder: Path) -> None:
    """Alternate the two sides, print each measurement, then medians, ratio and peaks."""
    archive, shards, copy = folder / "gpt.nemo", folder / "shards", folder / "copy"
    making = [sys.executable, "-m", "benchmarks.convert", "--write-only", str(archive), *arguments.to_argv()]
    subprocess.run(making, check=True)
    print(f"checkpoint {human_bytes(archive.stat().st_size)} {arguments.source_data_type}")
    converting = [sys.executable, "-m", "export_scripts.convert", f"--checkpoint={archive}", f"--output={shards}"]
    converting += [f"--tensor-para-size={arguments.tensor_para_size}", f"--processes={arguments.processes}"]
    converting += [f"--weight-data-type={arguments.weight_data_type}"]
    copies, conversions = [], []
    for _ in range(arguments.repeats):
        copies.append(_measure(["cp", str(archive), str(copy)]))
        copy.unlink()
        conversions.append(_measure(converting))
        shutil.rmtree(shards)
        print(f"cp {copies[-1]}   convert {conversions[-1]}")
    copy_s = statistics.median(run.elapsed_s for run in copies)
    convert_s = statistics.median(run.elapsed_s for run in conversions)
    peak_bytes = max(run.memory.peak_bytes for run in conversions)
    private_bytes = max(run.memory.peak_private_bytes for run in conversions)
    print(f"cp {copy_s:.2f} s   convert {convert_s:.2f} s   (medians)   ratio {convert_s / copy_s:.2f}")
    print(f"peak memory {human_bytes(peak_bytes)}, of which not file pages {human_bytes(private_bytes)}")


def main(argv: Sequence[str]) -> None:
    """Make the checkpoint in a process of its own, so that its memory is gone, and measure."""
    if argv and argv[0] == "--write-only":
        write_checkpoint(BenchmarkArguments.from_argv(argv[2:]), Path(argv[1]))
        return
    arguments = BenchmarkArguments.from_argv(argv, description=__doc__)
    with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="slipway-convert-") as folder:
        compare(arguments, Path(folder))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.convert"))
