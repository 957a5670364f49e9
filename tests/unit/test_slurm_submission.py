"""What is refused before sbatch is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from handover.errors import ConfigError
from launcher.config import ClusterConfig, ContainerRuntime
from launcher.executors import Job
from launcher.executors.slurm import SlurmExecutor
from launcher.plan import Command, Resources, StagePlan


def job_in(container: str | None, root: Path) -> Job:
    plan = StagePlan(
        stage="convert",
        name="convert",
        commands=(Command(("true",)),),
        resources=Resources(container=container),
        inputs=(),
        output=root / "out",
        log=root / "logs" / "convert.log",
    )
    return Job("convert", (plan,), root / "logs" / "stages.json")


@pytest.fixture
def slurm_without_pyxis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A FAKE Slurm: srun knows no container option, sbatch refuses whatever it gets."""
    for name, script in {"srun": "echo ' --mpi=type'", "sbatch": "echo sbatch: error: fake >&2; exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def refusal(cluster: ClusterConfig, container: str | None, root: Path) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        SlurmExecutor(cluster, None, root, [root]).submit([job_in(container, root)], ())
    return refused.value


def test_a_slurm_without_pyxis_is_named_before_anything_is_submitted(slurm_without_pyxis: Path) -> None:
    error = refusal(ClusterConfig(), "image", slurm_without_pyxis)
    assert "has no pyxis" in error.problem and "container_runtime" in error.hint


@pytest.mark.parametrize("container", [None, "image"])
def test_other_ways_to_run_do_not_need_pyxis(slurm_without_pyxis: Path, container: str | None) -> None:
    error = refusal(ClusterConfig(container_runtime=ContainerRuntime.docker), container, slurm_without_pyxis)
    assert "sbatch refused convert: fake" in error.problem


def test_where_there_is_no_sbatch_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no sbatch" in refusal(ClusterConfig(), None, tmp_path).problem
