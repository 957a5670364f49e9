"""Golden job scripts: the sbatch files and command lines that a run comes to, rendered where there is no Slurm.

One file a case, reviewed as a diff; ``make golden`` rewrites them. The files are what ``dry_run=true`` prints.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs.composed import FIVE, compare, compose, plans_of

from handover.errors import ConfigError
from launcher.config.choices import Stage
from launcher.config.schema import PROJECT_DIR, Config
from launcher.pipeline import executor_for, make_jobs
from launcher.plan import checks
from launcher.plan.paths import RunPaths

HERE = Path(__file__).resolve().parent
NEMO = PROJECT_DIR / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo"
BCM = [FIVE, "cluster_type=bcm", "export.run.model_train_name=gpt3_5b"]
IMAGE = "container=nvcr.io/nvidia/nemo:24.05"
TWO_NODES = [
    *("export.model.tensor_model_parallel_size=8", "export.triton_deployment.pipeline_model_parallel_size=2"),
    "deployment.engine=fastertransformer",
]
SLURM = {
    "host": BCM,
    "pyxis": [*BCM, *TWO_NODES, IMAGE, "container_mounts=[null,/mount/data]", "data_dir=/mount/data/pile"],
    "docker": [*BCM, *TWO_NODES, IMAGE, "cluster.container_runtime=docker", "cluster.container_args=[--privileged]"],
    "apptainer": [*BCM, *TWO_NODES, IMAGE, "cluster.container_runtime=apptainer"],
    "own_image": [
        *(*BCM, *TWO_NODES, IMAGE, "stages=[export,deploy,evaluate]", "deployment.container=/images/ft.sqsh"),
        *("export.model.checkpoint_path=/training/5b.nemo", "evaluation.lambada.data_path=/data/lambada.jsonl"),
    ],
    "gemm_autotune": [*BCM, *TWO_NODES, IMAGE, "stages=[deploy]", "deployment.gemm_autotune=true"],
    "none": [*BCM, IMAGE, "cluster.container_runtime=none", "stages=[convert]"],
    "every_key": [
        *(*BCM, IMAGE, "stages=[convert,export,deploy]", "force=[export]", "env_vars.NCCL_DEBUG=INFO"),
        *("cluster.partition=luna", "cluster.account=joc", "cluster.exclusive=false", "cluster.gpus_per_task=1"),
        *("cluster.gpus_per_node=4", "cluster.mem=2000", "cluster.overcommit=true", "cluster.job_name_prefix=x-"),
        *("cluster.setup=['module load cuda','ulimit -c 0']", "cluster.srun_args=[--no-container-mount-home]"),
        "cluster.additional_parameters={qos: high, comment: 'it is a night run', requeue: true}",
        *("export.run.time_limit=0:30:00", "deployment.run.time_limit=1-00:00:00", "export.run.dependency=afterany:7"),
    ],
    "deploy_alone": [*BCM, "stages=[deploy]"],
    "replicas": [  # parts of a node each, in a container; the router's job has the clients
        *(*BCM, IMAGE, "stages=[export,deploy,evaluate]", "deployment.replicas=2", "deployment.restart=1"),
        *("export.model.tensor_model_parallel_size=2", "cluster.exclusive=false", "cluster.mem=100000"),
    ],
    "replicas_nodes": [*BCM, *TWO_NODES[:2], "stages=[deploy]", "deployment.replicas=2"],
    "attached": [*BCM, "stages=[evaluate,benchmark]", "deployment.endpoint=node7:8001"],
    "hostile": [FIVE, "cluster_type=bcm", 'export.run.model_train_name="it\'s \\"; touch x $(touch y)"'],
}
BCP = {
    "bcp": [FIVE, "cluster_type=bcp", "export.run.model_train_name=gpt3_126m", *TWO_NODES[:2]],
    "bcp_hostile": [
        *(FIVE, "cluster_type=bcp", "bcp_no_redirect=false", 'launcher_scripts_path="/opt/it\'s here"'),
        'export.run.model_train_name="it\'s \\"; touch x $(touch y)"',
    ],
}


def render(config: Config) -> str:
    """What a run of this configuration would start."""
    paths, plans = RunPaths.of(config), plans_of(config)
    executor = executor_for(config, paths)
    commands = [
        f"$ {shlex.join(executor.wrap(command, plan.resources, plan.env))}\n"
        for plan in plans
        for command in plan.commands
    ]
    force = {stage.name for stage in config.force}
    return "".join(commands) + executor.preview(make_jobs(config, paths, plans), force)


@pytest.fixture(autouse=True)
def nothing_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """No sbatch, no srun, no bcprun."""
    monkeypatch.setenv("PATH", "")


@pytest.mark.parametrize("case", SLURM)
def test_sbatch_files_are_as_reviewed_and_read_by_bash(case: str, request: pytest.FixtureRequest) -> None:
    rendered = render(compose(SLURM[case]))
    compare(rendered, HERE / "slurm" / f"{case}.txt", request)
    for script in rendered.split("=== sbatch ")[1:]:
        body = script.partition("\n")[2]
        ended = subprocess.run(["/bin/bash", "-n"], input=body, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, ""), body


@pytest.mark.parametrize("case", BCP)
def test_bcp_commands_are_as_reviewed(case: str, request: pytest.FixtureRequest) -> None:
    compare(render(compose(BCP[case], cluster="bcp")), HERE / "slurm" / f"{case}.txt", request)


@pytest.mark.parametrize("path", ["/mount/a,b", "/mount/here:/mount/there", "relative"])
@pytest.mark.parametrize("runtime", ["pyxis", "docker", "apptainer"])
def test_a_path_that_cannot_be_mounted_is_refused(path: str, runtime: str) -> None:
    config = compose([*BCM, IMAGE, f"cluster.container_runtime={runtime}", f'container_mounts=["{path}"]'])
    paths = RunPaths.of(config)
    with pytest.raises(ConfigError, match=path) as refused:
        checks.check(config, paths, [])
    assert "container_mounts" in refused.value.hint


def test_only_fasterTransformer_is_tuned() -> None:  # noqa: N802
    config = compose([*BCM, "deployment.gemm_autotune=true"])
    with pytest.raises(ConfigError, match="gemm_autotune=true: the drop-in"):
        checks.check(config, RunPaths.of(config), [Stage.deploy])


def test_keys_for_an_api_that_is_off_are_refused() -> None:
    config = compose([*BCM, "deployment.api_keys_file=/secrets/keys.txt"])
    with pytest.raises(ConfigError, match="the OpenAI API is off"):
        checks.check(config, RunPaths.of(config), [Stage.deploy])


def test_results_that_cannot_be_mounted_are_refused_only_in_a_container(tmp_path: Path) -> None:
    base = f'base_results_dir="{tmp_path}/a:b"'
    plain = compose([*BCM, base])
    checks.check(plain, RunPaths.of(plain), [])
    contained = compose([*BCM, base, IMAGE])
    with pytest.raises(ConfigError, match="a:b"):
        checks.check(contained, RunPaths.of(contained), [])


def test_a_dry_run_prints_sbatch_files_where_there_is_no_slurm_and_writes_nothing(tmp_path: Path) -> None:
    assert shutil.which("sbatch") is None
    place = [f"base_results_dir={tmp_path}/results", f"export.model.checkpoint_path={NEMO}"]
    ended = subprocess.run(
        [sys.executable, str(PROJECT_DIR / "main.py"), *BCM, *place, "dry_run=true"],
        env={name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("#!/bin/bash") == 3
    assert "#SBATCH --dependency=afterok:JOB2,singleton" in ended.stdout
    assert list(tmp_path.iterdir()) == []
