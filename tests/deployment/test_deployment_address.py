"""Where a server listens: loopback, what was asked for, or the node's own address under Slurm."""

from __future__ import annotations

import socket

import pytest

from deployment.doors.address import listening_host, slurm_job
from handover.errors import ServerError

IN_JOB = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "localhost", "SLURM_JOB_NODELIST": "node[1-2]"}


@pytest.mark.parametrize(
    ("host", "environment", "expected"),
    [
        ("127.0.0.1", IN_JOB, "127.0.0.1"),
        ("0.0.0.0", IN_JOB, "0.0.0.0"),
        ("node", {}, "127.0.0.1"),
        ("node", {"SLURMD_NODENAME": "elsewhere"}, "127.0.0.1"),
        ("node", {"POD_IP": "10.1.2.3"}, "10.1.2.3"),
        ("127.0.0.1", {"POD_IP": "10.1.2.3"}, "127.0.0.1"),
        ("node", {**IN_JOB, "POD_IP": "10.1.2.3"}, socket.gethostbyname("localhost")),
        ("node", IN_JOB, socket.gethostbyname("localhost")),
        ("node", {**IN_JOB, "SLURMD_NODENAME": ""}, socket.gethostbyname(socket.gethostname())),
    ],
)
def test_the_address_follows_host_and_slurm(host: str, environment: dict[str, str], expected: str) -> None:
    assert listening_host(host, environment) == expected


def test_a_node_without_an_address_is_named() -> None:
    with pytest.raises(ServerError, match="'no such.invalid' has no address") as refused:
        listening_host("node", {**IN_JOB, "SLURMD_NODENAME": "no such.invalid"})
    assert refused.value.hint == "set deployment.host"


def test_the_job_is_published_only_where_there_is_one() -> None:
    assert slurm_job(IN_JOB) == {"job_id": "7", "nodes": "node[1-2]"}
    assert slurm_job({}) == {"job_id": "", "nodes": ""}
