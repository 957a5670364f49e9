"""Several servers that are jobs of their own on two nodes, behind a router that is a job: real Slurm, real HAProxy."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from support.servers.served import generate
from support.slurm.cluster import NODES, SlurmCluster, wait_until
from support.slurm.launches import PROJECT, SMALL, Launched, assert_clean, endpoint_of, serve
from support.slurm.replicas import asking, file_of, said_by

from handover.endpoint import Endpoint, deployment_of

pytestmark = pytest.mark.long  # what a job's end means to its router is in test_replica_jobs.py, by a fake Slurm

TWO = ("deployment.replicas=2", "cluster.exclusive=false", "cluster.gpus_per_task=5")  # of 8 GPUs: a node each
PROMPT = "the world"


def start(slurm: SlurmCluster, finished: Launched, root: Path, *arguments: str) -> Launched:
    launched = serve(slurm, finished, root, *TWO, "deployment.restart=1", *arguments)
    wait_until(endpoint_of(launched).exists, lambda: said_by(launched))
    return launched


@pytest.fixture(scope="module")
def served(slurm: SlurmCluster, finished: Launched, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return start(slurm, finished, tmp_path_factory.mktemp("jobs"))


def answer_of(served: Launched) -> str:
    return generate(Endpoint.read(endpoint_of(served)), PROMPT, 8)


def test_each_server_has_a_job_and_the_router_has_one_after_them(slurm: SlurmCluster, served: Launched) -> None:
    assert [job.stages for job in served.jobs] == ["replica-0", "replica-1", "deploy"]
    *servers, router = served.ids
    assert f"after:{':'.join(servers)}" in served.jobs[-1].dependency
    endpoints = [Endpoint.read(file_of(served, number)) for number in range(2)]
    assert [each.job_id for each in endpoints] == servers and {each.nodes for each in endpoints} == set(NODES)
    found = Endpoint.read(endpoint_of(served))
    assert (found.job_id, found.settings["replicas"], found.settings["router"]) == (router, "2", "haproxy")


def test_restart_starts_each_server_again_in_its_job_without_a_lost_request(
    slurm: SlurmCluster, served: Launched
) -> None:
    before = [deployment_of(file_of(served, number)) for number in range(2)]
    with asking(lambda: answer_of(served)) as failures:
        said = slurm.run(sys.executable, "-m", "launcher", "restart", str(served.results), cwd=PROJECT, timeout_s=300)
    assert "restarted  in" in said and not failures
    assert not set(before) & {deployment_of(file_of(served, number)) for number in range(2)}
    assert set(slurm.states(*served.ids).values()) == {"RUNNING"}
    assert {served.stages[stage]["state"] for stage in ("replica-0", "replica-1", "deploy")} == {"running"}


def test_a_job_that_is_cancelled_is_requeued_and_the_other_has_the_requests(
    slurm: SlurmCluster, served: Launched
) -> None:
    victim, before = served.ids[1], deployment_of(file_of(served, 1))
    with asking(lambda: answer_of(served)) as failures:
        slurm.run("scancel", victim)
        wait_until(lambda: deployment_of(file_of(served, 1)) not in ("", before), lambda: said_by(served))
        wait_until(lambda: "ready      replica 1" in served.jobs[-1].log.read_text().split("replacing")[-1], str)
    assert f"its job {victim} is CANCELLED" in served.jobs[-1].log.read_text()
    assert len(failures) < 5, "those in flight, and what was sent in the moment before the router noticed"


def test_cancel_ends_all_of_them(slurm: SlurmCluster, served: Launched) -> None:
    said = slurm.run(sys.executable, "-m", "launcher", "cancel", str(served.results), cwd=PROJECT)
    assert all(f"job {job}" in said for job in served.ids)
    slurm.wait_for_end(*served.ids)
    assert_clean(slurm, *NODES)
    assert not list(endpoint_of(served).parent.glob("**/endpoint.json"))


def test_a_router_that_is_killed_ends_its_servers_and_leaves_no_endpoint_file(
    slurm: SlurmCluster, finished: Launched, tmp_path: Path
) -> None:
    launched = start(slurm, finished, tmp_path)
    node = Endpoint.read(endpoint_of(launched)).nodes
    lines = slurm.processes_on(node).items()
    supervisor = next(pid for pid, line in lines if " -m deployment.replicas.serve" in line and "srun" not in line)
    os.kill(supervisor, signal.SIGKILL)
    ended = slurm.wait_for_end(*launched.ids)
    assert ended[launched.ids[-1]] == "FAILED" and launched.stages["deploy"]["state"] == "failed"
    assert_clean(slurm, *NODES)
    assert not list(endpoint_of(launched).parent.glob("**/endpoint.json"))


def test_clients_of_the_routers_job_ask_all_and_the_servers_end_after_the_last(
    slurm: SlurmCluster, finished: Launched, tmp_path: Path
) -> None:
    launched = serve(slurm, finished, tmp_path, *TWO, *SMALL, stages="deploy,evaluate")
    assert launched.jobs[-1].stages == "deploy+evaluate+report"
    assert set(slurm.wait_for_end(*launched.ids, timeout_s=300).values()) == {"COMPLETED"}, said_by(launched)
    assert {entry["state"] for entry in launched.stages.values()} == {"done"}
    assert "Requeue=0" in slurm.run("scontrol", "show", "job", launched.ids[0]), "deployment.restart=0"
    assert_clean(slurm, *NODES)
