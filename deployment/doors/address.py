"""Where a deployment listens, and in which job it runs. Standard library only."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping

from deployment.arguments import NODE, AnyServer
from handover.errors import ServerError

LOOPBACK = "127.0.0.1"
ANY_ADDRESS = ("0.0.0.0", "::")
"""Listening on these, a server is reached by any of the host's addresses."""


def listening_host(host: str, environment: Mapping[str, str]) -> str:
    """Return the address to listen on.

    Args:
        host: as configured; ``node`` means that other nodes must reach the server: under Slurm the address that
            this node's name has, in a pod POD_IP, elsewhere loopback.
        environment: of this process.

    Raises:
        ServerError: the node's name has no address.
    """
    if host != NODE:
        return host
    if not environment.get("SLURM_JOB_ID"):
        return environment.get("POD_IP") or LOOPBACK
    name = environment.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except (OSError, UnicodeError) as error:
        raise ServerError(f"this node's name '{name}' has no address: {error}", "set deployment.host") from error


def with_address(arguments: AnyServer, environment: Mapping[str, str]) -> AnyServer:
    """Put in the address for ``host=node``."""
    return dataclasses.replace(arguments, host=listening_host(arguments.host, environment))


def slurm_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Fields of the endpoint file that say which Slurm job serves; empty outside of Slurm."""
    return {"job_id": environment.get("SLURM_JOB_ID", ""), "nodes": environment.get("SLURM_JOB_NODELIST", "")}


def place_of(host: str, port: int) -> str:
    """Return ``host:port`` as URLs have it, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def own_address(host: str) -> str:
    """Where this host itself reaches a server that listens there."""
    return LOOPBACK if host in ANY_ADDRESS else host
