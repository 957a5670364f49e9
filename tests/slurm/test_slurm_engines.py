"""Another project's server as a job of the real cluster: a stand-in for its program, everything else real."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from support.engine_programs import PLACE
from support.slurm.cluster import NODES, SlurmCluster, wait_until
from support.slurm.launches import (
    PROJECT,
    Launched,
    assert_clean,
    launch,
    node_of,
    override,
)

LLAMA = PROJECT / "examples" / "llama_demo" / "checkpoints"
SMALL = ("evaluation.lambada.samples=4", "export.run.model_train_name=tiny", "export.model.weight_data_type=fp32")
ENGINE = ("deployment.engine=vllm", override("deployment.command", f"{sys.executable} {PLACE}/vllm"))
MODEL = (override("export.model.checkpoint_path", LLAMA), "export.triton_deployment.data_type=fp32")


@pytest.fixture(scope="module")
def evaluated(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    results = tmp_path_factory.mktemp("engines") / "re sults"
    launched = launch(slurm, results, "stages=[export,deploy,evaluate]", *ENGINE, *MODEL, *SMALL)
    slurm.wait_for_end(*launched.ids)
    return launched


def test_the_server_and_its_clients_are_one_job(slurm: SlurmCluster, evaluated: Launched) -> None:
    assert [job.stages for job in evaluated.jobs] == ["convert", "deploy+evaluate+report"]
    assert set(slurm.states(*evaluated.ids).values()) == {"COMPLETED"}, evaluated.jobs[-1].errors
    assert {stage["state"] for stage in evaluated.stages.values()} == {"done"}
    (metrics,) = evaluated.results.glob("*/*/evaluation/lambada/metrics.json")
    assert json.loads(metrics.read_text())["samples"] == 4
    for node in ("node1", "node2"):
        assert_no_engine(slurm, node)


def test_a_server_alone_is_reached_at_its_nodes_address_and_cancelled(slurm: SlurmCluster, evaluated: Launched) -> None:
    """scancel leaves it Slurm's KillWait; its children take no notice of SIGTERM."""
    launched = launch(slurm, evaluated.results, "stages=[deploy]", *ENGINE, *MODEL, *SMALL)
    file = evaluated.results / "tiny" / "export_tp1_pp1_fp32_fp32_vllm" / "deployment" / "endpoint.json"
    wait_until(file.exists, lambda: f"no {file}; {launched.jobs[0].errors}")
    endpoint = json.loads(file.read_text())
    node = node_of(slurm, launched)
    assert endpoint["job_id"] == launched.ids[0]
    assert endpoint["openai_url"] == f"http://{endpoint['host']}:{endpoint['openai_port']}/v1"
    assert endpoint["host"].startswith("127.0.1.")
    slurm.run("scancel", *launched.ids)
    assert list(slurm.wait_for_end(*launched.ids).values()) == ["CANCELLED"]
    assert_clean(slurm, node)
    assert_no_engine(slurm, node)
    assert not file.exists()


def assert_no_engine(slurm: SlurmCluster, node: str) -> None:
    """No stand-in runs on a node, whatever it calls itself; other tests' may run on this host."""
    wait_until(lambda: "STAND-IN::Core" not in slurm.names_on(node), lambda: f"left on {node}")


@pytest.mark.long
@pytest.mark.parametrize(
    ("victim", "reason"),
    [
        (" --headless", "vLLM was killed by SIGKILL"),
        (" -m deployment.engines.serve ", "is lost: it has hung up"),  # a task: srun asks the other to end at once
    ],
)
def test_over_both_nodes_what_dies_on_the_second_ends_the_job_with_its_reason(
    slurm: SlurmCluster, evaluated: Launched, victim: str, reason: str
) -> None:
    """A task a node; the first one's address is that of its node's name."""
    sizes = ("export.model.tensor_model_parallel_size=2", "deployment.nodes=2", "cluster.gpus_per_node=1")
    launched = launch(slurm, evaluated.results, "stages=[deploy]", *ENGINE, *MODEL, *SMALL, *sizes)
    directory = evaluated.results / "tiny" / "export_tp2_pp1_fp32_fp32_vllm" / "deployment"
    wait_until((directory / "endpoint.json").exists, lambda: f"no endpoint; {launched.jobs[0].errors}")
    lines = {log: (directory / log).read_text() for log in ("server.log", "server.rank1.log")}
    assert "--nnodes 2 --node-rank 0 --master-addr 127.0.1." in lines["server.log"]
    assert "--nnodes 2 --node-rank 1" in lines["server.rank1.log"] and "--headless" in lines["server.rank1.log"]
    victims = [pid for pid, line in slurm.processes_on(NODES[1]).items() if victim in line]
    assert victims and any(" --node-rank 0 " in line for line in slurm.processes_on(NODES[0]).values())
    os.kill(min(victims), signal.SIGKILL)  # the others are its children
    assert list(slurm.wait_for_end(*launched.ids).values()) == ["FAILED"]
    assert re.search(rf"process 1 of 2, on node2[:,] {reason}", launched.jobs[0].errors)
    for node in NODES:
        assert_clean(slurm, node)
        assert_no_engine(slurm, node)
    assert not [file for file in directory.iterdir() if "endpoint" in file.name]


@pytest.mark.long
def test_what_mpi_joins_is_launched_on_both_nodes_and_ends_in_good_order(slurm: SlurmCluster, tmp_path: Path) -> None:
    """srun starts TensorRT-LLM's launcher by pmix, a task a GPU; its words keep their place beside MPI's variables."""
    sizes = ("export.model.tensor_model_parallel_size=2", "deployment.nodes=2", "cluster.gpus_per_node=1")
    engine = ("deployment.engine=trtllm_serve", override("deployment.command", f"{PLACE}/trtllm-serve"), *sizes)
    path = f"cluster.setup=['export PATH={PLACE}:{Path(sys.executable).parent}:$PATH']"
    results = tmp_path / "results"  # the launcher takes no path with a space
    launched = launch(slurm, results, "stages=[convert,deploy]", *engine, path, *MODEL, *SMALL)
    directory = results / "tiny" / "export_tp2_pp1_fp32_fp32_trtllm_serve" / "deployment"
    wait_until((directory / "endpoint.json").exists, lambda: f"no endpoint; {launched.jobs[-1].errors}")
    assert "rank 0 of 2" in (directory / "server.log").read_text()
    assert "rank 1 of 2" in (directory / "server.rank1.log").read_text()
    slurm.run("scancel", launched.ids[-1])
    assert list(slurm.wait_for_end(launched.ids[-1]).values()) == ["CANCELLED"]
    for node in NODES:
        assert_clean(slurm, node)
        assert_no_engine(slurm, node)
    assert not [file for file in directory.iterdir() if "endpoint" in file.name]
