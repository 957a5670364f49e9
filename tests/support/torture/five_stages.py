"""The five stages with a tiny model, as campaigns run them: started, ended, looked at by code of the campaign's own."""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[3]
NEMO = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"
FIVE = "stages=[convert,export,deploy,evaluate,benchmark]"
TWO = "stages=[convert,export]"
_ANSWER_S = 300
_MIB = 1 << 20
_MANIFEST = "manifest.json"


@dataclass
class Run:
    """One results directory and the command that fills it.

    Attributes:
        root: of the campaign's trial: results and temporary files lie below it.
        stages: the override that chooses them.
        environment: added to ours.
        duration_s: how long it took, of one that was run to its end.
    """

    root: Path
    stages: str = FIVE
    environment: dict[str, str] = field(default_factory=dict)
    duration_s: float = 0.0

    @property
    def base(self) -> Path:
        return self.root / "results"

    @property
    def results(self) -> Path:
        return self.base / "tiny" / "export_tp1_pp1_fp16_fp16"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        """Start the command in a session of its own; what it prints goes to a file each."""
        self.temporary.mkdir(parents=True, exist_ok=True)
        output = self.root / f"output-{time.monotonic_ns()}"
        arguments = [
            *("cluster_type=interactive", f"base_results_dir={self.base}", self.stages),
            *(f"export.model.checkpoint_path={NEMO}", "export.run.model_train_name=tiny"),
            *("evaluation.lambada.samples=4", "benchmark.batch_sizes=[1]", "benchmark.lengths=[[8,8]]"),
            *("benchmark.repeats=3", *overrides),
        ]
        with output.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, str(PROJECT / "main.py"), *arguments],
                cwd=self.root,
                env={**os.environ, "TMPDIR": str(self.temporary), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        process.output = output  # type: ignore[attr-defined]  # for who reads what it printed
        return process

    def run(self, *overrides: str) -> tuple[int, str]:
        """Run the command to its end; returns its status and what it printed."""
        return ended(self.start(*overrides))

    def figures(self) -> dict[str, float]:
        """What the model scored; empty if nothing was published."""
        file = self.results / "evaluation" / "lambada" / "metrics.json"
        if not file.is_file():
            return {}
        return {metric["name"]: metric["value"] for metric in json.loads(file.read_text())["metrics"]}

    def shards(self) -> dict[str, str]:
        """Digest of everything that convert and export published, but for what says when and where it was made."""
        roots = [self.base / "tiny" / "ft_tp1_fp16" / "1-gpu", self.results / "model_repo"]
        files = [path for root in roots for path in root.rglob("*") if path.is_file() and path.name != _MANIFEST]
        return {str(path.relative_to(self.base)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    def damages(self) -> list[str]:
        """Say what is not whole of what has a manifest, by digests that this module computes."""
        problems = []
        for manifest in self.base.rglob(_MANIFEST):
            if any(part.endswith(".partial") or ".replaced-" in part for part in manifest.parts):
                continue
            for record in json.loads(manifest.read_text())["files"]:
                path = manifest.parent / record["path"]
                if not path.is_file() or path.stat().st_size != record["size_bytes"]:
                    problems.append(f"{path}: missing or of another size")
                elif digest(path, record["digest"].partition(":")[0]) != record["digest"]:
                    problems.append(f"{path}: other content")
        return problems

    def residue(self, seconds: float = 60) -> list[str]:
        """What is left of the run after that long: processes, shared memory, temporary files; best nothing."""
        deadline = time.monotonic() + seconds
        while (left := self._residue()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _residue(self) -> list[str]:
        processes = [f"{pid} {line[:160]}" for pid, line in command_lines().items() if str(self.root) in line]
        temporary = [path.name for path in self.temporary.glob("slipway-*")] if self.temporary.is_dir() else []
        everything = " ".join(command_lines().values())
        regions = [
            path.name
            for path in Path("/dev/shm").glob("slipway-*")
            if path.name[: len("slipway-0123456789ab-")] not in everything and self._is_ours(path)
        ]
        return processes + temporary + regions

    def _is_ours(self, region: Path) -> bool:
        """Whether a region is younger than this trial; others on the machine have theirs."""
        return region.stat().st_ctime >= self.root.stat().st_ctime

    def litter(self) -> list[str]:
        """Names in the results that no finished run has."""
        names = (path.relative_to(self.base).as_posix() for path in self.base.rglob("*"))
        return [name for name in names if re.search(r"\.partial(\.\w+)?(/|$)|\.slipway-tmp$|(^|/)\.[^/]+\.\d+$", name)]


@functools.cache
def whole(stages: str) -> Run:
    """A run that nothing disturbed, whose figures and shards all others must come to; each is made once."""
    folder = tempfile.mkdtemp(prefix="whole-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    run = Run(Path(folder), stages)
    started = time.monotonic()
    status, output = run.run()
    assert status == 0, output
    run.duration_s = time.monotonic() - started
    assert not run.damages() and not run.litter() and not run.residue()
    assert bool(run.figures()) == (stages == FIVE) and run.shards()
    return run


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of what ``start`` started; a command that hangs is killed and has the status 124."""
    try:
        status = process.wait(_ANSWER_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        status = 124
    output: Path = process.output  # type: ignore[attr-defined]
    return status, output.read_text(errors="replace")


def digest(path: Path, algorithm: str) -> str:
    """Compute a digest again: SHA-256, or SHA-256 over the CRC-32 of each MiB."""
    content = path.read_bytes()
    if algorithm == "sha256":
        return f"sha256:{hashlib.sha256(content).hexdigest()}"
    sums = b"".join(zlib.crc32(content[at : at + _MIB]).to_bytes(4, "big") for at in range(0, len(content), _MIB))
    return f"{algorithm}:{hashlib.sha256(sums).hexdigest()}"


def command_lines() -> dict[int, str]:
    """Of all processes but ours, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
    return found


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    members = [pid]
    for member in members:
        members += [child for child, parent in parents.items() if parent == member]
    return members


def rerun_problem(run: Run, figures: dict[str, float], shards: dict[str, str], *overrides: str) -> str:
    """Say what is wrong after the same command was given again and nothing disturbed it; empty if all is well."""
    status, output = run.run(*overrides)
    if status or "Traceback" in output:
        return f"the rerun ended with {status}: {output[-600:]}"
    wrong = {
        "figures": run.figures() != figures,
        "shards": run.shards() != shards,
        "litter": run.litter(),
        "damages": run.damages(),
        "residue": run.residue(),
    }
    return "; ".join(f"{name}: {found}" for name, found in wrong.items() if found)
