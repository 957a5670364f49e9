"""Two servers over two nodes each, jobs behind a router that is a job: four nodes of a real Slurm, a rank on each."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator

import pytest
from support.slurm.cluster import SlurmCluster, started, wait_until
from support.slurm.launches import NEMO, PROJECT, Launched, assert_clean, endpoint_of, launch, override
from support.slurm.replicas import asking, file_of, said_by
from support.slurm.two_ranks import ask, tokens_of_one_process

from handover.endpoint import Endpoint, deployment_of

pytestmark = pytest.mark.long
NODES = ("node1", "node2", "node3", "node4")


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    with started(NODES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def served(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    """A server takes 5 of a node's 8 GPUs, so no two share one, and leaves some of its 16 processors for the router."""
    root = tmp_path_factory.mktemp("pairs")
    launched = launch(
        slurm,
        root / "results",
        "stages=[convert,export,deploy]",
        override("export.model.checkpoint_path", shutil.copy(NEMO, root / "model.nemo")),
        "export.run.model_train_name=wide",
        "export.model.weight_data_type=fp32",
        "export.triton_deployment.data_type=fp32",
        "export.model.tensor_model_parallel_size=2",
        "cluster.gpus_per_node=1",
        "cluster.exclusive=false",
        "cluster.gpus_per_task=5",
        "deployment.replicas=2",
        "deployment.restart=1",
    )
    wait_until(
        lambda: bool(list(root.glob("results/wide/export_*/deployment/endpoint.json"))), lambda: said_by(launched)
    )
    return launched


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return tokens_of_one_process(tmp_path_factory.mktemp("convert"))


def servers_of(served: Launched) -> list[Endpoint]:
    return [Endpoint.read(file_of(served, number)) for number in range(2)]


def nodes_of(slurm: SlurmCluster, job: str) -> list[str]:
    listed = slurm.run("squeue", "-h", "-o", "%N", "-j", job).strip()
    return slurm.run("scontrol", "show", "hostnames", listed).split()


def test_each_server_has_a_rank_on_two_nodes_of_its_own(
    slurm: SlurmCluster, served: Launched, expected: list[list[int]]
) -> None:
    first, second = (nodes_of(slurm, job) for job in served.ids[-3:-1])
    assert len(first) == len(second) == 2 and sorted([*first, *second]) == list(NODES)
    for node in NODES:
        ranks = [line for line in slurm.processes_on(node).values() if "fastertransformer.worker" in line]
        assert len(ranks) == (0 if node in (first[0], second[0]) else 1)
    for endpoint in (*servers_of(served), Endpoint.read(endpoint_of(served))):
        assert ask(endpoint) == expected
    found = Endpoint.read(endpoint_of(served))
    assert (found.job_id, found.settings["replicas"]) == (served.ids[-1], "2")


def test_restart_starts_both_ranks_of_each_server_again_without_a_lost_request(
    slurm: SlurmCluster, served: Launched
) -> None:
    before = {each.deployment for each in servers_of(served)}
    with asking(lambda: ask(Endpoint.read(endpoint_of(served)))) as failures:
        said = slurm.run(sys.executable, "-m", "launcher", "restart", str(served.results), cwd=PROJECT, timeout_s=300)
    assert "restarted  in" in said and not failures
    assert not before & {each.deployment for each in servers_of(served)}
    assert set(slurm.states(*served.ids[-3:]).values()) == {"RUNNING"}


def test_a_rank_killed_on_a_servers_second_node_costs_that_job_alone_and_it_is_requeued(
    slurm: SlurmCluster, served: Launched, expected: list[list[int]]
) -> None:
    victim, before = served.ids[-2], deployment_of(file_of(served, 1))
    _, second = nodes_of(slurm, victim)
    (rank,) = (pid for pid, line in slurm.processes_on(second).items() if "fastertransformer.worker" in line)
    with asking(lambda: ask(Endpoint.read(endpoint_of(served)))) as failures:
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: deployment_of(file_of(served, 1)) not in ("", before), lambda: said_by(served))
        log = served.jobs[-1].log
        wait_until(lambda: "ready      replica 1" in log.read_text().split("replacing")[-1], lambda: said_by(served))
    assert f"its job {victim} is FAILED: deploy: rank 1 of 2 was killed by SIGKILL" in log.read_text()
    assert len(failures) < 5, "those in flight, and what was sent in the moment before the router noticed"
    assert [ask(endpoint) for endpoint in servers_of(served)] == [expected, expected]


def test_cancel_ends_all_on_all_nodes(slurm: SlurmCluster, served: Launched) -> None:
    said = slurm.run(sys.executable, "-m", "launcher", "cancel", str(served.results), cwd=PROJECT)
    assert all(f"job {job}" in said for job in served.ids[-3:])
    slurm.wait_for_end(*served.ids)
    assert_clean(slurm, *NODES)
    assert not list(endpoint_of(served).parent.glob("**/*endpoint*"))
