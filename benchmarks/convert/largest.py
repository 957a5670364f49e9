r"""Convert DeepSeek-V3 (671 B) and Kimi K2 (1 T) on a machine that has room for neither, and measure.

    python3 -m benchmarks.convert.largest                                       # both, whole: 1.4 and 2.1 TB
    python3 -m benchmarks.convert.largest --models='["kimi_k2"]' --seconds=300  # all of the plan, and what 300 s write
    python3 -m benchmarks.convert.largest --layers=5                            # the first five layers

The source is one of Megatron-Bridge with every name, shape and chunk, whose weights are holes in files. The conversion
is ``export_scripts.convert``, with one change: bytes that are zeros, as all its weights are, are discarded behind the
digest. The target's files have their size already, so that they stay holes and no byte of the result changes. It is a
tmpfs that is mounted for the benchmark alone, larger than the memory. Reading holes costs no disk, and nothing is
written: the processor's time of all else is what is measured, beside the memory. Run it as root, or where user
namespaces are allowed (``unshare --map-root-user --mount``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.convert.speed import MemorySampler, _machine, _out, cpu_s
from export_scripts.conversion.write.journal import FILE_NAME as JOURNAL
from export_scripts.conversion.write.journal import GROWING
from handover.arguments import ScriptArguments
from handover.errors import exit_status
from handover.manifest import Manifest
from handover.progress import human_bytes

_MOUNTED, _DISCARDING = "--mounted", "--discarding"
_EVERY_S = 0.2


@dataclass(frozen=True)
class LargestArguments(ScriptArguments):
    """What to convert, and how long."""

    models: tuple[str, ...] = field(default=("deepseek_v3", "kimi_k2"), metadata={"help": "deepseek_v3, kimi_k2"})
    layers: int = field(default=0, metadata={"help": "of each model; 0: all"})
    seconds: int = field(default=0, metadata={"help": "stop each conversion then; 0: at its end"})
    processes: int = field(default=2, metadata={"help": "parallel workers"})
    directory: Path | None = field(default=None, metadata={"help": "where the source is; default: the temporary one"})


def convert_discarding(argv: Sequence[str]) -> None:
    """Convert, and write no zeros."""
    from export_scripts import convert
    from export_scripts.conversion.write import late_writes, room, shard_file

    def write_at(descriptor: int, content: memoryview, offset: int) -> None:
        if np.frombuffer(content, np.uint8).max():
            shard_file.write_at(descriptor, content, offset)

    vars(late_writes)["write_at"] = write_at
    vars(room)["_MOST_BYTES"] = 0  # a hole has none
    convert.main(argv)


def measure(name: str, arguments: LargestArguments, source: Path, output: Path) -> None:
    """Convert one model and print what it took."""
    making = [sys.executable, "-m", "benchmarks.convert.largest", "--write-only", name, str(arguments.layers)]
    subprocess.run([*making, str(source)], check=True)
    argv = [sys.executable, "-m", "benchmarks.convert.largest", _DISCARDING]
    argv += [f"--checkpoint={source}", f"--output={output}"]
    argv += ["--format=huggingface", "--weight-data-type=bf16", f"--processes={arguments.processes}"]
    started, planned, while_planning, spent_s = time.monotonic(), 0.0, 0, 0.0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(argv, stdout=said, stderr=said)
        with MemorySampler(process.pid) as memory:
            while process.poll() is None:
                spent_s = max(spent_s, cpu_s(process.pid))
                if not planned and any(output.glob("*.safetensors*")):
                    planned, while_planning = time.monotonic() - started, memory.peak_bytes
                if arguments.seconds and time.monotonic() - started > arguments.seconds:
                    process.terminate()
                    process.wait()
                time.sleep(_EVERY_S / 10)
        elapsed_s = time.monotonic() - started
        is_whole = process.returncode == 0
        if not is_whole and (not arguments.seconds or not planned):
            said.seek(0)
            raise RuntimeError(f"the conversion ended with status {process.returncode}\n{said.read()[-2000:]}")
    headers = [_names(path) for end in ("", GROWING) for path in output.glob(f"*.safetensors{end}")]
    tensors = sum(len(header) for header in headers)
    source_bytes = sum(path.stat().st_size for path in source.rglob("*.distcp"))
    _out(f"\n{name}: {human_bytes(source_bytes)}, {len(headers)} files of {tensors} tensors")
    _out(f"planned after {planned:.1f} s with {human_bytes(while_planning)} at most")
    written = sum(path.stat().st_size for path in output.glob("*.safetensors")) + _noted_bytes(output)
    how_far = "all of it, digests included" if is_whole else f"stopped after {arguments.seconds} s"
    _out(f"written {human_bytes(written)}, {how_far}, in {elapsed_s:.0f} s; {spent_s:.0f} s of processor")
    _out(f"{spent_s / (written / 1e9):.2f} s of processor a GB, {written / 1e9 / elapsed_s:.2f} GB/s")
    most = 200_000_000 + 100 * tensors
    _out(
        f"peak {human_bytes(memory.peak_bytes)}, without pages of files {human_bytes(memory.peak_private_bytes)}; "
        f"200 MB and 100 bytes a tensor are {human_bytes(most)}"
    )
    if is_whole:
        Manifest.read(output)


def _noted_bytes(output: Path) -> int:
    """Sum up what the journal of a conversion that was stopped has of files that are not whole."""
    journal = output / JOURNAL
    entries = [json.loads(line) for line in journal.read_text().splitlines()] if journal.is_file() else []
    return sum(entry["size_bytes"] for entry in entries if str(entry.get("path")).endswith(GROWING))


def _names(path: Path) -> list[str]:
    """List the tensors of a safetensors file."""
    with path.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return [name for name in header if name != "__metadata__"]


def main(argv: Sequence[str]) -> None:
    """Mount the target in a namespace of its own, and measure each model."""
    if argv[:1] == ["--write-only"]:
        from benchmarks.convert.largest_sources import write_largest

        write_largest(argv[1], int(argv[2]), Path(argv[3]))
        return
    if argv[:1] == [_DISCARDING]:
        convert_discarding(argv[1:])
        return
    arguments = LargestArguments.from_argv([each for each in argv if each != _MOUNTED], description=__doc__)
    if _MOUNTED not in argv:
        with tempfile.TemporaryDirectory(prefix="slipway-largest-") as target:
            mount = f'mount -t tmpfs -o size=8T tmpfs "{target}" && exec "$@"'
            again = [sys.executable, "-m", "benchmarks.convert.largest", *argv, _MOUNTED]
            environment = {**os.environ, "SLIPWAY_LARGEST_TARGET": target}
            wrapped = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *again]
            subprocess.run(wrapped, check=True, env=environment)
        return
    target = Path(os.environ["SLIPWAY_LARGEST_TARGET"])
    _out(_machine(target))
    for name in arguments.models:
        with tempfile.TemporaryDirectory(dir=arguments.directory, prefix="slipway-largest-") as folder:
            measure(name, arguments, Path(folder) / name, target / name)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "benchmarks.convert.largest"))
