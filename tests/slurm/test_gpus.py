"""What the server's task really sees in CUDA_VISIBLE_DEVICES, against the table of the inference guide."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from support.slurm.cluster import NODES, SlurmCluster
from support.slurm.launches import PROJECT, Launched

from deployment.arguments import ServeArguments
from launcher.plan.plan import Resources, python_module
from launcher.plan.topology import topology
from launcher.run.srun import FIRST_NODE, SlurmSteps

TABLE = {  # TP, PP -> nodes and CUDA_VISIBLE_DEVICES of the guide's command line; None: it sets none
    (1, 1): (1, "0"),
    (2, 1): (1, "0,1"),
    (4, 1): (1, "0,1,2,3"),
    (8, 1): (1, None),
    (8, 2): (2, None),
    (16, 1): (2, None),
}
ALL = "0,1,2,3,4,5,6,7"
SERVER = """#!/bin/bash
echo "${CUDA_VISIBLE_DEVICES-unset}" > "$SEEN.$SLURMD_NODENAME"
exit 1
"""


@pytest.mark.parametrize(
    ("options", "no_limit"),
    [
        (["--exclusive", "--gres=gpu:8"], ALL),
        pytest.param(["--exclusive", "--gpus-per-node=8"], ALL, marks=pytest.mark.long),  # as with gres
        ([], "unset"),
    ],
    ids=["gres", "gpus_per_node", "without"],
)
def test_the_task_sees_the_gpus_of_the_guides_table(
    slurm: SlurmCluster,
    finished: Launched,
    tmp_path: Path,
    options: list[str],
    no_limit: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows at once, each as a step of one allocation; a stand-in for tritonserver writes down what it sees."""
    monkeypatch.setenv(FIRST_NODE, NODES[0])  # as the runner finds it
    (repository,) = finished.results.glob("*/*/model_repo")
    (tmp_path / "tritonserver").write_text(SERVER)
    (tmp_path / "tritonserver").chmod(0o755)
    lines = [f"export PATH={shlex.quote(str(tmp_path))}:$PATH"]
    for (tp, pp), (nodes, _) in TABLE.items():
        folder = tmp_path / f"{tp}_{pp}"
        arguments = ServeArguments(
            repository,
            folder / "endpoint.json",
            folder / "server.log",
            engine="fastertransformer",
            cuda_devices=topology(tp, pp, gpus_per_node=8).cuda_devices or "",
        )
        command = python_module("deployment.serve", arguments)
        step = SlurmSteps(directory=str(PROJECT)).wrap(command, Resources(nodes, gpus_per_node=min(8, tp * pp)))
        lines.append(f"SEEN={shlex.quote(str(folder))}.seen {shlex.join(step)} &")
    script = "\n".join((*lines, "wait", "exit 0"))
    where = ["--nodes=2", f"--chdir={PROJECT}", f"--output={tmp_path}/job.txt", f"--wrap={script}"]
    job = slurm.run("sbatch", "--parsable", *options, *where).strip()
    assert slurm.wait_for_end(job) == {job: "COMPLETED"}
    seen = {path.name: path.read_text().strip() for path in tmp_path.glob("*.seen.*")}
    assert seen == {
        f"{tp}_{pp}.seen.{node}": devices or no_limit
        for (tp, pp), (nodes, devices) in TABLE.items()
        for node in NODES[:nodes]
    }, (tmp_path / "job.txt").read_text()
