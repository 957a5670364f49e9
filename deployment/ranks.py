"""A deployment over several nodes: one serve process a node, of which the first talks to clients.

FasterTransformer's backend joins the servers of all nodes through MPI; only rank 0 takes requests. The
others run the same server with its ports closed. Standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from deployment.arguments import ServeArguments
from handover.errors import ServerError

_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_CLOSED = ("--allow-http=false", "--allow-grpc=false", "--allow-metrics=false")


def find_rank(environment: Mapping[str, str]) -> int:
    """Return which of the launched processes this is: MPI's word, else Slurm's; 0 outside of both."""
    values = [environment[name] for name in _VARIABLES if environment.get(name, "").isdigit()]
    return int(values[0]) if values else 0


def arguments_of(rank: int, arguments: ServeArguments) -> ServeArguments:
    """Give a rank other than the first files and ports of its own.

    Raises:
        ServerError: the engine cannot be spread over nodes.
    """
    if rank == 0:
        return arguments
    if arguments.engine != "fastertransformer":
        raise ServerError(
            f"engine '{arguments.engine}' serves on one node, but this is process {rank} of several",
            "choose TP x PP that fits one node, or deployment.engine=fastertransformer in its container",
        )
    return dataclasses.replace(
        arguments,
        endpoint=arguments.endpoint.with_name(f"{arguments.endpoint.stem}.rank{rank}{arguments.endpoint.suffix}"),
        log=arguments.log.with_name(f"{arguments.log.stem}.rank{rank}{arguments.log.suffix}"),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        server_args=(*arguments.server_args, *_CLOSED),
    )
