"""``python -m launcher doctor`` on the test cluster, and on a host that lacks things."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.slurm.cluster import SlurmCluster

PROJECT = Path(__file__).resolve().parents[2]
DOCTOR = [sys.executable, "-m", "launcher", "doctor"]


def states_of(text: str) -> dict[str, str]:
    """Check -> state, out of the printed table."""
    rows = [line[2:] for line in text.splitlines() if line.startswith("  ") and "mend:" not in line]
    return {row[:14].strip(): row[14:].split()[0] for row in rows}


def test_everything_that_the_cluster_has_is_found(slurm: SlurmCluster, tmp_path: Path) -> None:
    text = slurm.run(*DOCTOR, str(tmp_path / "results"), cwd=PROJECT)
    states = states_of(text)
    assert {check: states[check] for check in ("slurm", "pmix", "shared files", "nodes")} == dict.fromkeys(
        ("slurm", "pmix", "shared files", "nodes"), "ok"
    )
    assert (states["python"], states["tritonserver"]) == ("ok", "note")


def test_what_srun_refuses_is_not_blamed_on_the_storage(slurm: SlurmCluster, tmp_path: Path) -> None:
    command = [*DOCTOR, str(tmp_path), "--partition=nowhere"]
    ended = subprocess.run(
        command, cwd=PROJECT, env=slurm.client_environment(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and "shared files" not in ended.stdout
    assert "srun refuses: " in ended.stdout and "invalid partition specified: nowhere" in ended.stdout
    assert "--partition (debug)" in ended.stdout


def test_a_controller_that_does_not_answer_is_named_with_the_mend(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n")
    environment = {"PATH": "/usr/bin:/bin", "SLURM_CONF": str(tmp_path / "slurm.conf")}
    ended = subprocess.run(
        [*DOCTOR, str(tmp_path)], cwd=PROJECT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and "1 of the checks failed" in ended.stderr
    assert states_of(ended.stdout)["slurm"] == "bad" and "mend: check scontrol ping" in ended.stdout
