"""A model over two nodes: one process of our engine on each, started by srun --mpi=pmix."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.slurm.cluster import NODES, SlurmCluster, wait_until
from support.slurm.launches import NEMO, Launched, assert_clean, is_running, launch, override
from support.slurm.two_ranks import ask, tokens_of_one_process

from handover.endpoint import Endpoint


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return tokens_of_one_process(tmp_path_factory.mktemp("convert"))


def start(slurm: SlurmCluster, root: Path, tensor: int, pipeline: int, clients: str = "", *more: str) -> Launched:
    """Serve over both nodes, each with half of the ranks."""
    checkpoint = shutil.copy(NEMO, root / "model.nemo")
    launched = launch(
        slurm,
        root / "results",
        f"stages=[convert,export,deploy{clients}]",
        override("export.model.checkpoint_path", checkpoint),
        "export.run.model_train_name=wide",
        f"deployment.run.name={root.name}",
        "export.model.weight_data_type=fp32",
        "export.triton_deployment.data_type=fp32",
        f"export.model.tensor_model_parallel_size={tensor}",
        f"export.triton_deployment.pipeline_model_parallel_size={pipeline}",
        f"cluster.gpus_per_node={tensor * pipeline // len(NODES)}",
        *more,
    )
    wait_until(lambda: has_endpoint(launched), lambda: said_by(launched))
    return launched


@pytest.fixture(autouse=True)
def no_server_outlives_its_test(slurm: SlurmCluster, tmp_path: Path) -> Iterator[None]:
    yield
    slurm.run("scancel", f"--name=nemo-megatron-{tmp_path.name}")


def endpoint_of(launched: Launched) -> Path:
    return next(launched.results.glob("wide/export_*")) / "deployment" / "endpoint.json"


def said_by(launched: Launched) -> str:
    """All that the last job has said, and its server."""
    job = launched.jobs[-1]
    files = [job.log, job.log.with_suffix(".err"), *launched.results.glob("wide/export_*/deployment/server*.log")]
    return "\n".join(f"{file}:\n{file.read_text()}" for file in files if file.exists()) or "the job is pending"


def has_endpoint(launched: Launched) -> bool:
    return bool(list(launched.results.glob("wide/export_*/deployment/endpoint.json")))


def workers(slurm: SlurmCluster, node: str) -> list[int]:
    return [pid for pid, line in slurm.processes_on(node).items() if "fastertransformer.worker" in line]


def test_two_ranks_on_two_nodes_give_the_tokens_of_one(
    slurm: SlurmCluster, tmp_path: Path, expected: list[list[int]]
) -> None:
    server = start(slurm, tmp_path, tensor=2, pipeline=1)
    assert ask(Endpoint.read(endpoint_of(server))) == expected
    job = server.ids[-1]
    printed = slurm.run("scontrol", "show", "job", job)
    assert "NumNodes=2" in printed and re.search(r"NodeList=node\[1-2\]", printed)
    first, second = (slurm.processes_on(node).values() for node in NODES)
    assert any("tritonserver" in line for line in first) and not any("tritonserver" in line for line in second)
    assert len(workers(slurm, NODES[1])) == 1 and not workers(slurm, NODES[0])
    slurm.run("scancel", job)
    slurm.wait_for_end(job)
    assert_clean(slurm, *NODES)
    assert not list(endpoint_of(server).parent.glob("*endpoint*"))


# Several ranks a node are in test_same_everywhere.py, stages of a pipeline in tests/engine/test_engine_ranks.py.
@pytest.mark.parametrize("pipeline", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_rank_killed_on_the_second_node_ends_the_job_within_a_minute(
    slurm: SlurmCluster, tmp_path: Path, expected: list[list[int]], pipeline: int
) -> None:
    server = start(slurm, tmp_path, tensor=2, pipeline=pipeline)
    assert ask(Endpoint.read(endpoint_of(server))) == expected
    assert [len(workers(slurm, node)) for node in NODES] == [pipeline - 1, pipeline]
    os.kill(workers(slurm, NODES[1])[0], signal.SIGKILL)
    assert slurm.wait_for_end(server.ids[-1]) == {server.ids[-1]: "FAILED"}
    killed = rf"rank [{pipeline}-{2 * pipeline - 1}] of {2 * pipeline} was killed by SIGKILL"
    assert re.search(killed, server.jobs[-1].errors + server.jobs[-1].log.read_text())
    assert_clean(slurm, *NODES)


@pytest.mark.long
def test_a_rank_killed_during_the_benchmark_ends_the_job_within_a_minute(slurm: SlurmCluster, tmp_path: Path) -> None:
    endless = ("benchmark.batch_sizes=[1]", "benchmark.lengths=[[8,8]]", "benchmark.repeats=5000")
    server = start(slurm, tmp_path, 2, 1, ",benchmark", *endless)
    wait_until(lambda: is_running(server, "benchmark"), lambda: f"no benchmark: {server.jobs[-1].errors}")
    os.kill(workers(slurm, NODES[1])[0], signal.SIGKILL)
    assert slurm.wait_for_end(server.ids[-1]) == {server.ids[-1]: "FAILED"}
    assert server.stages["benchmark"]["state"] == "failed"
    assert re.search(r"rank 1 of 2 was killed by SIGKILL", server.jobs[-1].errors + server.jobs[-1].log.read_text())
    assert_clean(slurm, *NODES)
