"""A job is the same wherever it runs and from wherever it is submitted: what sacct and the tasks themselves see.

The plans are those of a run with all stages; each command is replaced by one that writes its environment down.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from support.runs.composed import compose, plans_of
from support.slurm.cluster import SlurmCluster
from support.slurm.launches import PROJECT, override

from launcher.config.schema import Config, register
from launcher.pipeline import executor_for, make_jobs
from launcher.plan.paths import RunPaths
from launcher.plan.plan import StagePlan, partial

SIZES = {"tp1": (1, 1, 1), "tp2": (2, 1, 2), "tp2_pp2": (2, 2, 2)}  # TP, PP and GPUs of a node
SERVER_TASKS = {"tp1": (1, 1), "tp2": (1, 2), "tp2_pp2": (2, 2)}  # nodes, and tasks on each
ONE_TASK = ("convert", "evaluate", "benchmark", "report")
SESSION = {  # of an srun below an allocation, of mpirun and torchrun, and of a user's defaults for other jobs
    **{
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NPROCS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": "1",
    },
    **{"SLURM_MEM_PER_CPU": "100", "SLURM_MEM_PER_GPU": "100", "SLURM_GPUS_PER_TASK": "1", "SLURM_GPUS": "1"},
    **{"SLURM_EXPORT_ENV": "NONE", "SLURM_CLUSTERS": "beta", "SLURM_LABELIO": "1", "SLURM_CPU_BIND": "rank"},
    **{"SRUN_CPUS_PER_TASK": "7", "SRUN_EXPORT_ENV": "NONE", "SLURM_STEP_ID": "0", "SLURM_DISTRIBUTION": "cyclic"},
    **{"SBATCH_EXPORT": "NONE", "SBATCH_ARRAY_INX": "0-1", "SBATCH_TIMELIMIT": "1", "SBATCH_MEM_PER_CPU": "100"},
    **{"PMIX_RANK": "1", "PMI_RANK": "1", "PMI_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "elsewhere", "CUDA_VISIBLE_DEVICES": "7"},
    **{"SQUEUE_PARTITION": "other", "SQUEUE_STATES": "PENDING", "SCANCEL_PARTITION": "other", "SACCT_FEDERATION": "1"},
}
IN_A_TASK = r"SLURM_|SRUN_|PMIX?_(?:RANK|SIZE)|OMPI_|RANK=|WORLD|LOCAL_|MASTER|CUDA|NCCL|OF_THE_SHELL"
OF_ONE_JOB = (  # differs between any two jobs, or says where and by whom one was submitted
    r"_DEPENDENCY$|_JOB_?(?:ID|NAME|UID|USER|GID|START_TIME|END_TIME)$|SUBMIT|_PORT|_PID|_ADDR|_HOST|GTIDS|_NODELIST|NODENAME|SRUN_COMM"
    r"|SLURM_SCRIPT_CONTEXT|OMPI_MCA_orte_precondition_transports"  # of the step, by Slurm 24.11
)
_GPUS = re.compile(r"^(CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|\w+_GPUS)=([\d,]+)$", re.MULTILINE)
RECORD = """mkdir -p {place}; env > {place}/task.$SLURM_PROCID.$$; {more}"""
SERVE = """trap 'kill $!; exit 0' USR1
[ $SLURM_PROCID = 0 ] && printf '{{"run": "%s"}}' $SLIPWAY_RUN > {endpoint}
sleep 60 & wait"""
MAKE = "mkdir -p {output} && touch {output}/made"


@pytest.fixture
def session(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A plain shell on the login node."""
    for name in [name for name in os.environ if name not in slurm.client_environment()]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.setenv("OF_THE_SHELL", "kept")
    register()
    yield monkeypatch
    GlobalHydra.instance().clear()


def recording(plan: StagePlan, root: Path) -> StagePlan:
    """The plan with commands that write down their environment, beside what their stage must bring about."""
    made = SERVE.format(endpoint=shlex.quote(str(plan.output / "endpoint.json")))
    if not plan.service:
        made = MAKE.format(output=shlex.quote(str(partial(plan.output))))
    script = RECORD.format(place=shlex.quote(str(root / "seen" / plan.stage)), more=made)
    commands = tuple(replace(command, argv=("/bin/sh", "-c", script)) for command in plan.commands)
    return replace(plan, commands=commands, inputs=())


def config_of(root: Path, size: str, *more: str) -> Config:
    tensor, pipeline, gpus = SIZES[size]
    return compose(
        [
            *("stages=[convert,deploy,evaluate,benchmark]", "cluster_type=bcm"),
            *("cluster.exclusive=false", "cluster.cpus_per_task=1"),
            *(override("base_results_dir", root / "results"), f"launcher_scripts_path={PROJECT}"),
            *(f"export.run.model_train_name={root.name}", f"cluster.gpus_per_node={gpus}"),
            f"export.model.tensor_model_parallel_size={tensor}",
            f"export.triton_deployment.pipeline_model_parallel_size={pipeline}",
            *more,
        ]
    )


def submit(root: Path, size: str, *more: str) -> list[str]:
    """Submit a whole run; returns the ids of its jobs."""
    root.mkdir()
    config = config_of(root, size, *more)
    paths = RunPaths.of(config)
    jobs = make_jobs(config, paths, [recording(plan, root) for plan in plans_of(config)])
    for job in jobs:
        job.write()
    executor_for(config, paths).submit(jobs, ())
    return [file.name.partition("_")[0] for file in sorted(root.glob("results/*/*/logs/*/*_submission.sh"))]


def steps(slurm: SlurmCluster, jobs: list[str]) -> list[tuple[str, str, str]]:
    """Of every step of the jobs: number, nodes and tasks, as the accounting has them."""
    printed = slurm.run("sacct", "-n", "-P", "-o", "JobID,NNodes,NTasks", "-j", ",".join(sorted(jobs, key=int)))
    rows = [line.split("|") for line in printed.splitlines()]
    return [(step.partition(".")[2], nodes, tasks) for step, nodes, tasks in rows if re.search(r"\.\d", step)]


def seen(root: Path) -> dict[str, list[list[str]]]:
    """Of every stage: the environment of each of its tasks, without what differs between any two jobs."""
    found = {}
    for place in sorted((root / "seen").iterdir()):
        texts = [_GPUS.sub(_count, file.read_text()) for file in sorted(place.iterdir())]
        found[place.name] = [
            sorted(
                line
                for line in text.splitlines()
                if re.match(IN_A_TASK, line) and not re.search(OF_ONE_JOB, line.partition("=")[0])
            )
            for text in texts
        ]
    return found


def node_of(root: Path, stage: str) -> str:
    """Where a stage's first task ran."""
    (file,) = (root / "seen" / stage).glob("task.0.*")
    found = re.search(r"^SLURMD_NODENAME=(.+)$", file.read_text(), re.MULTILINE)
    assert found
    return found[1]


def _count(devices: re.Match[str]) -> str:
    """Which GPUs of a node a job gets depends on the others there."""
    return f"{devices[1]}={devices[2].count(',') + 1} GPUs"


def test_steps_and_tasks_are_the_same_from_any_session_and_clients_run_once(
    slurm: SlurmCluster, session: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    submitted = {f"plain_{size}": submit(tmp_path / f"plain_{size}", size) for size in SIZES}
    for name, value in SESSION.items():
        session.setenv(name, value)
    submitted |= {f"other_{size}": submit(tmp_path / f"other_{size}", size) for size in SIZES}
    submitted["per_task"] = submit(tmp_path / "per_task", "tp2", "cluster.gpus_per_task=1")
    ids = [job for jobs in submitted.values() for job in jobs]
    assert set(slurm.wait_for_end(*ids).values()) == {"COMPLETED"}, [
        file.read_text() for file in tmp_path.glob("*/results/*/*/logs/*/*.err")
    ]
    for size, (nodes, tasks) in SERVER_TASKS.items():
        server = ("0", str(nodes), str(nodes * tasks))
        convert = ("0", "1", "1")  # a job of its own
        expected = [convert, server, *((str(step), "1", "1") for step in (1, 2, 3))]
        plain, other = seen(tmp_path / f"plain_{size}"), seen(tmp_path / f"other_{size}")
        assert steps(slurm, submitted[f"plain_{size}"]) == steps(slurm, submitted[f"other_{size}"]) == expected
        assert {stage: len(found) for stage, found in plain.items()} == {
            **dict.fromkeys(ONE_TASK, 1),
            "deploy": nodes * tasks,
        }
        for stage in plain:
            one, another = ({line for task in found[stage] for line in task} for found in (plain, other))
            assert one ^ another == set(), f"{stage}, {size}"
        assert plain == other
        clients = ("evaluate", "benchmark", "report")  # ask a server on loopback
        assert len({node_of(tmp_path / f"plain_{size}", stage) for stage in ("deploy", *clients)}) == 1
        if size == "tp2":
            assert seen(tmp_path / "per_task") == plain, "cluster.gpus_per_task shapes the allocation alone"
            assert steps(slurm, submitted["per_task"]) == expected
        for task in (*plain["deploy"], *plain["evaluate"]):
            assert f"CUDA_VISIBLE_DEVICES={SIZES[size][2]} GPUs" in task
        for task in (task for found in plain.values() for task in found):
            assert "OF_THE_SHELL=kept" in task and "NCCL_LAUNCH_MODE=GROUP" in task
