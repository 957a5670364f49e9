"""What is refused before sbatch is asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from handover.errors import ConfigError
from launcher.config.schema import ClusterConfig, ContainerRuntime
from launcher.plan.plan import Command, Resources, StagePlan
from launcher.submit import Job
from launcher.submit.slurm import SlurmExecutor


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


@pytest.mark.parametrize("word", ["back\\slash", "%job", "%task"])
def test_what_would_be_read_as_something_else_in_a_path_is_refused(slurm_without_pyxis: Path, word: str) -> None:
    error = refusal(ClusterConfig(), None, slurm_without_pyxis / word)
    assert "means something else to Slurm" in error.problem and word in error.problem


def test_a_percent_sign_in_a_path_is_kept(tmp_path: Path) -> None:
    job = job_in(None, tmp_path / "p%u_x")
    text = SlurmExecutor(ClusterConfig(), None, tmp_path, []).render(job, (), None)
    assert f"#SBATCH --output={tmp_path}/p%%u_x/logs/convert/%j_0_log.out\n" in text
    assert "wckey" not in text, "submitit's own"


def limited(stage: str, limit: str, root: Path, always: bool = False) -> StagePlan:
    plan = job_in(None, root).plans[0]
    return replace(plan, stage=stage, resources=Resources(time_limit=limit), always=always)


def test_a_job_has_the_time_of_all_its_stages_and_the_report_adds_none(tmp_path: Path) -> None:
    limits = (("deploy", "0:01:00"), ("evaluate", "0:02:00"), ("evaluate", "0:02:00"), ("benchmark", "0:04:00"))
    plans = [limited(stage, limit, tmp_path) for stage, limit in limits]
    report = limited("report", "0:10:00", tmp_path, always=True)
    executor = SlurmExecutor(ClusterConfig(exclusive=False), None, tmp_path, [])
    parameters = executor.parameters(Job("deploy", (*plans, report), tmp_path / "logs" / "stages.json"), None)
    assert parameters["additional_parameters"]["time"] == "0:07:00"
    assert parameters["cpus_per_task"] == 4, "a job that shares its nodes would get one"
