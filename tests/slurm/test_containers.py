"""Containers on the real Slurm: what slurmd receives of pyxis's options, and ranks under docker and apptainer.

There is no container here. pyxis's options are registered by a plugin of this suite (container_options.c, which is
not pyxis); docker and apptainer are fakes (fakes/) that refuse unknown flags. srun, mpirun and the ranks are real.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.slurm.cluster import NODES, SlurmCluster
from support.slurm.launches import NEMO, PROJECT, assert_clean, launch, override

from launcher.plan.plan import Command, Resources, StagePlan, partial
from launcher.run.srun import SlurmSteps

FAKES = Path(__file__).with_name("fakes")
IMAGE = "registry.example/team/image:1.0"
VENV_FIRST = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the host plays the image: its python3 is ours
REPORT = """
import json, os, pathlib, socket, sys, time
names = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
rank = next(os.environ[name] for name in names if name in os.environ)
found = {"host": socket.gethostname(), "cwd": os.getcwd()}
found |= {"image": os.environ["FAKE_IMAGE"], "given": os.environ["GIVEN"], "mode": os.environ["NCCL_LAUNCH_MODE"]}
place = pathlib.Path(sys.argv[1])
place.mkdir(exist_ok=True)
(place / f"rank{rank}.json").write_text(json.dumps(found))
while len(list(place.glob("rank*"))) < 2:
    time.sleep(0.05)
"""

SERVER = """
import json, os, pathlib, signal, sys, time
names = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")
rank = next(os.environ[name] for name in names if name in os.environ)
place = pathlib.Path(sys.argv[1])
def stop(*_):
    (place / f"stopped{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGUSR1, stop)
if rank == "0":
    (place / "endpoint.json").write_text(json.dumps({"host": "fake", "run": os.environ["SLIPWAY_RUN"]}))
else:
    (place / "up").touch()
time.sleep(60)
"""
CLIENT = """
import pathlib, sys, time
while not (pathlib.Path(sys.argv[1]) / "up").exists():
    time.sleep(0.05)
place = pathlib.Path(sys.argv[2])
place.mkdir(exist_ok=True)
(place / "scored").touch()
"""


def test_slurmd_receives_pyxis_options_as_rendered(slurm: SlurmCluster, tmp_path: Path) -> None:
    """The checkpoint lies outside of everything that is mounted anyway, and the data directory does not exist."""
    data = tmp_path / "da ta; 'x'"
    data.mkdir()
    checkpoint = Path(shutil.copy(NEMO, tmp_path))
    launched = launch(
        slurm,
        tmp_path / "results",
        "stages=[convert]",
        "export.run.model_train_name=contained",
        override("export.model.checkpoint_path", checkpoint),
        override("env_vars.PATH", VENV_FIRST),
        override("data_dir", tmp_path / "nowhere"),
        f"container={IMAGE}",
        f'container_mounts=["{data}"]',
        "cluster.srun_args=[--no-container-mount-home]",
        f'cluster.setup=["export PATH={FAKES}:$PATH FAKE_ENROOT_LOG={tmp_path}/removed"]',
    )
    (job,) = launched.ids
    assert slurm.wait_for_end(job) == {job: "COMPLETED"}, launched.jobs[0].errors
    mounts = ",".join(f"{path}:{path}" for path in (PROJECT, tmp_path / "results", data, checkpoint))
    (received,) = slurm.received_options(job).values()
    image, listed, name, *others = received
    assert (image, listed) == (f"--container-image={IMAGE}", f"--container-mounts={mounts}")
    assert others == [
        f"--container-workdir={PROJECT}",
        "--no-container-mount-home",
        "--container-env=NCCL_LAUNCH_MODE,PATH",
    ]
    assert re.fullmatch(rf"--container-name=slipway-{job}-[0-9a-f]{{8}}:no_exec", name), "one import for all steps"
    removed = (tmp_path / "removed").read_text().split()
    assert removed == [name.replace("--container-name=", "pyxis_").replace(":no_exec", "")]


def test_without_a_container_slurmd_receives_none(slurm: SlurmCluster) -> None:
    job = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=srun true").strip()
    assert slurm.wait_for_end(job) == {job: "COMPLETED"}
    assert slurm.received_options(job) == {}


@pytest.mark.parametrize(("runtime", "image"), [("docker", IMAGE), ("apptainer", f"docker://{IMAGE}")])
def test_ranks_in_containers_run_one_a_node(slurm: SlurmCluster, tmp_path: Path, runtime: str, image: str) -> None:
    directory = tmp_path / "a di'r; touch x"
    directory.mkdir()
    plan = plan_of(tmp_path, "deploy", REPORT, str(partial(tmp_path / "deploy")), nodes=2)
    printed = run_as_job(slurm, tmp_path, directory, runtime, plan)
    found = [json.loads((tmp_path / "deploy" / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [each.pop("host") for each in found] == list(NODES), printed
    assert found == [{"cwd": str(directory), "image": image, "given": "it's $(touch x)", "mode": "PARALLEL"}] * 2
    assert list(directory.iterdir()) == []
    assert_clean(slurm, *NODES)


@pytest.mark.parametrize("runtime", ["docker", "apptainer"])
def test_a_server_of_several_ranks_is_stopped_in_good_order(slurm: SlurmCluster, tmp_path: Path, runtime: str) -> None:
    server = plan_of(tmp_path, "deploy", SERVER, str(tmp_path / "deploy"), nodes=2)
    client = plan_of(tmp_path, "evaluate", CLIENT, str(tmp_path / "deploy"), str(partial(tmp_path / "evaluate")))
    plans = replace(server, service=True), replace(client, needs_server=True)
    printed = run_as_job(slurm, tmp_path, tmp_path, runtime, *plans)
    stopped = sorted(path.name for path in (tmp_path / "deploy").glob("stopped*"))
    assert stopped == ["stopped0", "stopped1"], printed
    assert_clean(slurm, *NODES)


def plan_of(root: Path, stage: str, code: str, *arguments: str, nodes: int = 1) -> StagePlan:
    return StagePlan(
        stage=stage,
        name=stage,
        commands=(Command((sys.executable, "-c", code, *arguments)),),
        resources=Resources(nodes=nodes, container=IMAGE),
        inputs=(),
        output=root / stage,
        log=root / f"{stage}.log",
        env={"GIVEN": "it's $(touch x)", "NCCL_LAUNCH_MODE": "PARALLEL", "PATH": f"{FAKES}:{VENV_FIRST}"},
    )


def run_as_job(slurm: SlurmCluster, root: Path, directory: Path, runtime: str, *plans: StagePlan) -> str:
    """Run plans on two nodes to a good end; returns what was printed."""
    files = [root / f"{plan.stage}.json" for plan in plans]
    for file, plan in zip(files, plans, strict=True):
        file.write_text(plan.to_json())
    place = SlurmSteps(directory=str(directory), mounts=(str(root), str(directory)), runtime=runtime)
    runner = [sys.executable, "-m", "launcher.runner", f"--place={place.to_json()}", *map(str, files)]
    output = root / "job.txt"
    options = ["--parsable", "--nodes=2", f"--output={output}", f"--chdir={PROJECT}", "--time=2"]
    job = slurm.run("sbatch", *options, f"--wrap=exec {shlex.join(runner)}").strip()
    assert slurm.wait_for_end(job) == {job: "COMPLETED"}, output.read_text()
    return output.read_text()
