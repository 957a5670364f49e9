"""A server that is a Slurm job of its own, and clients of other jobs that attach to it."""

from __future__ import annotations

import json
import re
import socket
import sys

import pytest
from support.slurm.cluster import NODES, SlurmCluster
from support.slurm.launches import (
    PROJECT,
    SMALL,
    Launched,
    assert_clean,
    endpoint_of,
    launch,
    node_of,
    override,
    serve,
    wait_for_endpoint,
)


@pytest.fixture(scope="module")
def server(slurm: SlurmCluster, finished: Launched, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    launched = serve(slurm, finished, tmp_path_factory.mktemp("alone"))
    wait_for_endpoint(launched)
    return launched


def test_the_endpoint_file_says_where_and_in_which_job(slurm: SlurmCluster, server: Launched) -> None:
    endpoint = json.loads(endpoint_of(server).read_text())
    node = node_of(slurm, server)
    assert (endpoint["job_id"], endpoint["nodes"]) == (server.ids[0], node)
    assert endpoint["host"] == f"127.0.1.{NODES.index(node) + 1}"  # this node's own, see slurm_files.py
    for port in ("http_port", "grpc_port", "metrics_port"):
        with socket.create_connection((endpoint["host"], endpoint[port]), timeout=5):
            pass
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", endpoint[port]), timeout=5)


def test_clients_of_other_jobs_attach_and_the_server_stays(slurm: SlurmCluster, server: Launched) -> None:
    """Into the results directory of the server's own run: that must not be forgotten over it."""
    endpoint = json.loads(endpoint_of(server).read_text())
    names = ("export.run.model_train_name=tiny", "evaluation.run.name=attached", "benchmark.run.name=attached_too")
    by_file = override("deployment.endpoint", endpoint_of(server))
    one = launch(slurm, server.results, "stages=[evaluate]", *names, *SMALL, by_file)
    assert list(slurm.wait_for_end(*one.ids).values()) == ["COMPLETED"], one.jobs[0].errors
    by_address = f"deployment.endpoint={endpoint['host']}:{endpoint['grpc_port']}"
    other = launch(slurm, server.results, "stages=[benchmark]", *names, *SMALL, by_address, "benchmark.vocab_size=1000")
    assert list(slurm.wait_for_end(*other.ids).values()) == ["COMPLETED"], other.jobs[0].errors
    (results,) = server.results.glob("*/*")
    assert json.loads((results / "evaluation" / "lambada" / "metrics.json").read_text())["samples"] == 20
    assert (results / "benchmark" / "static" / "benchmark.csv").is_file()
    printed = slurm.run(sys.executable, "-m", "launcher", "status", str(server.results), cwd=PROJECT)
    found = re.findall(r"^  (\w+) +(\w+) .* job (\d+) (\w+)", printed, re.MULTILINE)
    assert ("deploy", "running", server.ids[0], "RUNNING") in found
    assert ("benchmark", "done", other.ids[0], "COMPLETED") in found


def test_cancel_ends_the_server_from_the_results_directory(slurm: SlurmCluster, server: Launched) -> None:
    node = node_of(slurm, server)
    printed = slurm.run(sys.executable, "-m", "launcher", "cancel", str(server.results), cwd=PROJECT)
    assert printed.split() == ["cancelled", "job", server.ids[0], "deploy"]
    assert list(slurm.wait_for_end(*server.ids).values()) == ["CANCELLED"]
    assert_clean(slurm, node)
    assert not endpoint_of(server).exists()
    assert "nothing to cancel" in slurm.run(
        sys.executable, "-m", "launcher", "cancel", str(server.results), cwd=PROJECT
    )
