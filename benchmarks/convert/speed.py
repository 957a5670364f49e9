r"""Time the conversion against ``cp`` of the same bytes, in alternation, and measure its memory.

    python3 -m benchmarks.convert.speed                                             # 2.6 GB, 1.3 B parameters
    python3 -m benchmarks.convert.speed --shapes='[[12,1536],[24,2048],[34,3072]]'  # 0.8, 2.6 and 8.0 GB: the curve
    python3 -m benchmarks.convert.speed --sources='["gzip","zarr","zarr_grid","torch_dist"]'    # other forms of it
    python3 -m benchmarks.convert.speed --format=huggingface --sources='["nemo","nemo_rotary","huggingface"]'
    python3 -m benchmarks.convert.speed --format=huggingface --sources='["bridge"]' --source-data-type=bf16 \\
        --weight-data-type=bf16
    python3 -m benchmarks.convert.speed --format=huggingface --sources='["llama"]' --source-data-type=bf16 \
        --weight-data-type=bf16 --quantizations='["fp8","fp8_block","int4"]'
    python3 -m benchmarks.convert.speed --bound=true                    # beside what only reads, writes and sums up
    python3 -m benchmarks.convert.speed --profile=true                              # where processor time goes (perf)
    python3 -m benchmarks.convert.speed --fastertransformer=/path/to/FasterTransformer

The checkpoint is made up: random weights of a GPT, in NeMo's legacy form unless others are named. To Hugging Face only
``nemo`` is transposed: GPT-2 of transformers keeps matrices as [in, out], GPT-NeoX, which ``nemo_rotary`` becomes, as
NeMo does. All sides start with a warm page cache and an idle disk. Ours ends with its bytes on the disk, as ``cp`` and
then ``sync`` do; the others end with theirs in the page cache. In a tmpfs that is the same. What a run has written is
emptied, not deleted, before the next: ext4 searches long for inodes that were not deleted a moment ago, and no real
conversion meets that. The host of a virtual machine may take unused memory back: as much as a side writes is touched
before it begins, or the first side alone would wait for new pages. Memory is measured in a run of its own: who measures
it takes a tenth of both processors. A busy machine is judged by processor time.
"""

from __future__ import annotations

import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from benchmarks.convert.peer import converter, environment
from benchmarks.convert.profile import lines, profile
from handover.arguments import ScriptArguments
from handover.errors import exit_status
from handover.progress import human_bytes

_SAMPLE_EVERY_S = 0.05


@dataclass(frozen=True)
class BenchmarkArguments(ScriptArguments):
    """The shape of the checkpoint and how often to measure."""

    shapes: tuple[tuple[int, int], ...] = field(
        default=((24, 2048),), metadata={"help": "[layers, width] of each checkpoint; heads are 64 wide"}
    )
    sources: tuple[str, ...] = field(
        default=("nemo",),
        metadata={"help": "nemo, nemo_rotary, gzip, zarr, zarr_grid, torch_dist, huggingface, llama, bridge: its form"},
    )
    format: str = field(default="fastertransformer", metadata={"help": "fastertransformer or huggingface: the target"})
    quantizations: tuple[str, ...] = field(
        default=(), metadata={"help": "of a Hugging Face directory: what is measured as well"}
    )
    largest_file_bytes: int | None = field(
        default=None, metadata={"help": "of a Hugging Face directory's files, bytes; default: the conversion's own"}
    )
    vocab: int = field(default=50304, metadata={"help": "rows of the embedding"})
    source_data_type: str = field(default="fp16", metadata={"help": "fp32, fp16 or bf16, in the checkpoint"})
    weight_data_type: str = field(default="fp16", metadata={"help": "fp32, fp16 or bf16, in the shards"})
    tensor_para_size: int = field(default=8, metadata={"help": "ranks to split for"})
    processes: int = field(default=2, metadata={"help": "parallel workers"})
    bound: bool = field(default=False, metadata={"help": "time what only reads, writes and takes checksums as well"})
    repeats: int = field(default=3, metadata={"help": "measurements of each side"})
    profile: bool = field(default=False, metadata={"help": "say where the processor's time goes; needs perf"})
    directory: Path | None = field(default=None, metadata={"help": "where to work; default: the temporary directory"})
    fastertransformer: Path | None = field(default=None, metadata={"help": "a checkout, whose converter is timed too"})


class MemorySampler:
    """Sum the memory of a process and its descendants, again and again, and keep the peaks.

    Shared pages are divided among those who share them (PSS), so that the sum counts each once.

    Attributes:
        peak_bytes: mapped pages of files included.
        peak_private_bytes: anonymous memory and shared memory alone: what is lost to others.
    """

    def __init__(self, pid: int, every_s: float = _SAMPLE_EVERY_S) -> None:
        self.peak_bytes = 0
        self.peak_private_bytes = 0
        self._every_s = every_s
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
        while not self._stopped.wait(self._every_s):
            sizes = [_memory(pid) for pid in _tree(self._pid)]
            self.peak_bytes = max(self.peak_bytes, sum(total for total, _ in sizes))
            self.peak_private_bytes = max(self.peak_private_bytes, sum(private for _, private in sizes))


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(descendant for child in children for descendant in _tree(int(child)))]


def cpu_s(pid: int) -> float:
    """Sum the processor's time of a process and of its descendants, which one that is stopped does not report."""
    spent = 0
    for each in _tree(pid):
        with suppress(OSError):
            spent += sum(map(int, Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return spent / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> tuple[int, int]:
    """Bytes of one process, all and without pages of files; nothing if it just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss")}
    return sizes.get("Pss", 0), sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)


@dataclass(frozen=True)
class Measurement:
    """One run of a command.

    Attributes:
        elapsed_s: wall-clock time.
        cpu_s: processor time of all its processes: what a busy machine does not distort.
        memory: its peaks, of a run that is for them.
    """

    elapsed_s: float
    cpu_s: float
    memory: MemorySampler | None

    def __str__(self) -> str:
        return f"{self.elapsed_s:6.2f} s ({self.cpu_s:5.2f} s of processor)"


def _measure(argv: Sequence[str], variables: Mapping[str, str], samples: bool) -> Measurement:
    """Run a command with nothing left to write back from before; Python keeps its bytecode, as it does by default."""
    environment = {**os.environ, **variables}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    os.sync()
    cpu_s = _children_cpu_s()
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(argv, env=environment, stdout=said, stderr=said)
        with MemorySampler(process.pid) if samples else nullcontext() as memory:
            status = process.wait()
        elapsed_s = time.monotonic() - started
        if status:
            said.seek(0)
            raise RuntimeError(f"{shlex.join(argv)} ended with status {status}\n{said.read()[-2000:]}")
    return Measurement(elapsed_s, _children_cpu_s() - cpu_s, memory)


def _touch_memory(size_bytes: int) -> None:
    """Use as much memory as that for a moment."""
    flags = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE"
    subprocess.run([sys.executable, "-c", f"import mmap; mmap.mmap(-1, {size_bytes}, flags={flags})"], check=True)


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Contender:
    """One side of the comparison.

    Attributes:
        name: for people.
        argv: of one run; ``{output}`` stands for the path to write.
        variables: of its environment.
    """

    name: str
    argv: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def run(self, output: Path, samples: bool = False) -> Measurement:
        """Run once, and measure its memory or its time; then empty what it wrote."""
        measured = _measure([part.format(output=output) for part in self.argv], self.variables, samples)
        for path in (output, *output.rglob("*")):
            if path.is_file() and path.stat().st_nlink == 1:  # others are the source's
                os.truncate(path, 0)
        return measured


def contenders(arguments: BenchmarkArguments, archive: Path) -> list[Contender]:
    """List the sides: ``cp`` first, ours second."""
    settings = [f"--tensor-para-size={arguments.tensor_para_size}", f"--processes={arguments.processes}"]
    settings += [f"--weight-data-type={arguments.weight_data_type}", f"--format={arguments.format}"]
    if arguments.largest_file_bytes:
        settings.append(f"--largest-file-bytes={arguments.largest_file_bytes}")
    ours = (sys.executable, "-m", "export_scripts.convert", f"--checkpoint={archive}", "--output={output}", *settings)
    copied = ("sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', str(archive), "{output}")
    sides = [Contender("cp", ("cp", "-r", str(archive), "{output}")), Contender("convert", ours)]
    sides += [Contender(f"convert {name}", (*ours, f"--quantization={name}")) for name in arguments.quantizations]
    sides.append(Contender("cp and sync", copied))
    if arguments.bound:
        least = (sys.executable, "-m", "benchmarks.convert.bound", f"--checkpoint={archive}", "--output={output}")
        sides += [Contender(f"bound, {n} files", (*least, f"--files={n}", settings[1])) for n in (1, 2)]
    if arguments.fastertransformer:
        checkout = arguments.fastertransformer
        theirs = [sys.executable, str(converter(checkout)), f"--in-file={archive}", "--saved-dir={output}"]
        theirs += [f"--infer-gpu-num={arguments.tensor_para_size}", f"--processes={arguments.processes}"]
        theirs += [f"--weight-data-type={arguments.weight_data_type}", "--load-checkpoints-to-cpu=1"]
        sides.append(Contender("FasterTransformer", tuple(theirs), environment(checkout, archive.parent)))
    return sides


def compare(arguments: BenchmarkArguments, source: str, shape: tuple[int, int], folder: Path) -> None:
    """Alternate the sides, print each measurement, then medians, ratios to ``cp`` and peaks."""
    archive = folder / "gpt.nemo"
    making = replace(arguments, shapes=(shape,), sources=(source,)).to_argv()
    subprocess.run(
        [sys.executable, "-m", "benchmarks.convert.speed", "--write-only", str(archive), *making], check=True
    )
    size_bytes = sum(path.stat().st_size for path in (archive, *archive.rglob("*")) if path.is_file())
    kind = f"{human_bytes(size_bytes)} {arguments.source_data_type}"
    _out(f"\n{source}, {shape[0]} layers, width {shape[1]}: {kind}")
    sides = contenders(arguments, archive)
    runs: dict[str, list[Measurement]] = {side.name: [] for side in sides}
    for number in range(arguments.repeats):
        for side in sides:
            _touch_memory(size_bytes * 5 // 4)
            runs[side.name].append(side.run(folder / f"{side.name}{number}"))
        _out("   ".join(f"{name} {measured[-1]}" for name, measured in runs.items()))
    copy_s = statistics.median(run.elapsed_s for run in runs["cp"])
    for side in sides:
        measured, memory = runs[side.name], side.run(folder / f"{side.name}-memory", samples=True).memory
        assert memory is not None
        elapsed_s = statistics.median(run.elapsed_s for run in measured)
        cpu_s = statistics.median(run.cpu_s for run in measured)
        _out(
            f"{side.name:<18} {elapsed_s:6.2f} s  {elapsed_s / copy_s:5.2f} x cp  {cpu_s:6.2f} s of processor  "
            f"peak {human_bytes(memory.peak_bytes):>9}, "
            f"without pages of files {human_bytes(memory.peak_private_bytes):>9}"
        )
    if arguments.profile:
        for side in sides[:2]:
            argv = [part.format(output=folder / f"{side.name}-profiled") for part in side.argv]
            _out(f"processor time of {side.name}")
            for line in lines(profile(argv, {**os.environ, **side.variables}, folder)):
                _out(line)


def _machine(folder: Path) -> str:
    """Say what the figures hold for."""
    processors = len(os.sched_getaffinity(0))
    model = next((line.split(": ")[1] for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "unknown")
    mounts = [line.split()[1:3] for line in _lines("/proc/mounts")]
    under = [mount for mount in mounts if folder.resolve().is_relative_to(mount[0])]
    file_system = max(under, key=lambda mount: len(mount[0]))[1] if under else "unknown"
    load = os.getloadavg()[0]
    return f"{processors} processors ({model}), {file_system}, Linux {os.uname().release}, load {load:.1f} before"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _out(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> None:
    """Make each checkpoint in a process of its own, so that its memory is gone, and measure."""
    if argv and argv[0] == "--write-only":
        from benchmarks.convert.sources import Model, write_checkpoint

        making = BenchmarkArguments.from_argv(argv[2:])
        model = Model(*making.shapes[0], making.vocab, making.source_data_type)
        write_checkpoint(making.sources[0], model, Path(argv[1]))
        return
    arguments = BenchmarkArguments.from_argv(argv, description=__doc__)
    _out(_machine(arguments.directory or Path(tempfile.gettempdir())))
    for source, shape in product(arguments.sources, arguments.shapes):
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="slipway-convert-") as folder:
            compare(arguments, source, shape, Path(folder))


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.convert.speed"))
