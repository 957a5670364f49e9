"""Time main.py from its start to the shell's prompt for five stages submitted to a real Slurm; print the median.

    python3 -m benchmarks.submit                 # starts the two-node Slurm of tests/slurm, as root

The jobs are held back (``begin``), so that they do not take the processor from the next measurement, and cancelled at
the end. main.py checks the checkpoint, writes the plans and calls sbatch once for each of three jobs.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from handover.arguments import ScriptArguments
from handover.errors import ServerError, exit_status

PROJECT = Path(__file__).resolve().parent.parent
CHECKPOINT = PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"
TARGET_S = 2.5
_JOBS = 3

sys.path.insert(0, str(PROJECT / "tests"))
from support.slurm.cluster import SlurmCluster  # noqa: E402


@dataclass(frozen=True)
class SubmitArguments(ScriptArguments):
    """What to measure."""

    repeats: int = field(default=10, metadata={"help": "launches that count; one more goes before them"})


def time_launch(slurm: SlurmCluster, results: Path) -> float:
    """Launch five stages; returns the seconds until main.py has ended.

    Raises:
        ServerError: it failed, or did not submit the jobs.
    """
    command = [
        *(sys.executable, str(PROJECT / "main.py"), "stages=[convert,export,deploy,evaluate,benchmark]"),
        *(f"base_results_dir={results}", "export.run.model_train_name=timed"),
        *(f"export.model.checkpoint_path={CHECKPOINT}", "cluster.additional_parameters={begin: now+3600}"),
    ]
    started = time.perf_counter()
    ended = subprocess.run(command, env=slurm.client_environment(), capture_output=True, text=True, check=False)
    elapsed_s = time.perf_counter() - started
    if ended.returncode or ended.stdout.count(" submitted ") != _JOBS:
        raise ServerError(f"main.py did not submit {_JOBS} jobs\n{ended.stdout}{ended.stderr}")
    return elapsed_s


def main(argv: Sequence[str]) -> None:
    """Measure, and print each launch and the median beside the target."""
    arguments = SubmitArguments.from_argv(argv, __doc__)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as directory,
        tempfile.TemporaryDirectory(prefix="results-") as results,
        SlurmCluster(Path(directory)) as slurm,
    ):
        times_s = [time_launch(slurm, Path(results) / str(index)) for index in range(arguments.repeats + 1)][1:]
        slurm.run("scancel", "--user=root")
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, Python {platform.python_version()}, load {load:.1f} at the end")
    print("launches   " + " ".join(f"{elapsed_s:.2f}" for elapsed_s in times_s) + " s")
    print(f"median     {statistics.median(times_s):.2f} s of {arguments.repeats}   target {TARGET_S} s")


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "submit"))
