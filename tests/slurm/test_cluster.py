"""The cluster of the tests is what the tests take it for: two nodes apart, MPI between them, accounting."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.slurm.cluster import NODES, SlurmCluster, wait_until
from support.slurm.slurm_files import GPUS_PER_NODE

HOLD = """
import sys, time
from pathlib import Path
from support.slurm.cluster import SlurmCluster
cluster = SlurmCluster(Path(sys.argv[1]))
cluster.start()
print(*cluster.daemons.values(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def test_both_nodes_are_idle_and_have_gpus(slurm: SlurmCluster) -> None:
    lines = slurm.run("sinfo", "-h", "-N", "-o", "%N %t %G").splitlines()
    assert lines == [f"{node} idle gpu:{GPUS_PER_NODE}" for node in NODES]
    assert "CUDA_VISIBLE_DEVICES=0,1\n" in slurm.run("srun", "--nodes=1", "--gpus-per-node=2", "env")


def test_pmix_starts_ranks_over_both_nodes(slurm: SlurmCluster) -> None:
    show = 'echo "$PMIX_RANK $(hostname)"; touch "/dev/shm/of $(hostname)"; ls /dev/shm; rm /dev/shm/of*'
    printed = slurm.run("srun", "--mpi=pmix", "--nodes=2", "--ntasks-per-node=1", "--label", "bash", "-c", show)
    assert sorted(printed.splitlines()) == ["0: 0 node1", "0: of node1", "1: 1 node2", "1: of node2"]


def test_accounting_follows_a_job_to_its_end(slurm: SlurmCluster) -> None:
    good = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=exit 0").strip()
    bad = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=exit 3").strip()
    assert slurm.wait_for_end(good, bad) == {good: "COMPLETED", bad: "FAILED"}


def test_no_daemon_outlives_a_killed_parent(short_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(short_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 6
        os.kill(parent.pid, signal.SIGKILL)
    marker = str(short_path).encode()
    wait_until(lambda: not _processes_with(marker, pids), lambda: f"still there: {_processes_with(marker, pids)}")


def _processes_with(marker: bytes, pids: list[int]) -> list[str]:
    """Processes that are one of these or were started with the directory in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_ours = entry.name.isdigit() and (
                int(entry.name) in pids or b"SLURM_CONF=" + marker in (entry / "environ").read_bytes()
            )
            if is_ours and (entry / "cmdline").read_bytes():
                found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return found
