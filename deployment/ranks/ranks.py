"""A deployment of several processes: the first talks to clients, the others take part in what it computes.

FasterTransformer's backend joins the servers of all nodes through MPI: one process a node, each runs the same server,
those of the others with closed ports. Our engine takes one process a rank; those of the others run no server, see
``workers.py``. Which process this is, ``launchers.py`` finds out. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deployment.arguments import ServeArguments
from deployment.life.leftovers import rendezvous_file
from deployment.ranks.launchers import RUNS, Rank
from deployment.triton.installation import FASTERTRANSFORMER
from handover.endpoint import RUN_VARIABLE
from handover.errors import ServerError

if TYPE_CHECKING:  # it reads configurations of Triton, by packages that other engines' containers do not have
    from deployment.proof.served_models import ServedModel

ENGINE_VARIABLE = "SLIPWAY_RANKS"
"""Tells a process of our engine what it is; ``backends/fastertransformer/engine/parallel/rank.py`` reads it."""

ALONE = "alone"
"""Its value for a process that is alone."""

_CLOSED = ("--allow-http=false", "--allow-grpc=false", "--allow-metrics=false")


def file_of(rank: int, file: Path) -> Path:
    """Return the file of a rank other than the first, in the place of one of the first's."""
    return file.with_name(f"{file.stem}.rank{rank}{file.suffix}")


def arguments_of(rank: int, arguments: ServeArguments) -> ServeArguments:
    """Return the arguments of a rank: other than the first, it has files and ports of its own."""
    if rank == 0:
        return arguments
    return dataclasses.replace(
        arguments,
        endpoint=file_of(rank, arguments.endpoint),
        log=file_of(rank, arguments.log),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        openai_port=None,
        server_args=(*arguments.server_args, *_CLOSED),
    )


def ranks_of_node(rank: Rank, models: Sequence[ServedModel], engine: str) -> list[Rank]:
    """Return the ranks that this process stands for, of which it is the first.

    A pod or a node that has one process gets a rank for each of its GPUs, where the model has a multiple of the nodes.
    """
    ranks = models[0].tensor_para_size * models[0].pipeline_para_size if len(models) == 1 else 0
    count, rest = divmod(ranks, rank.world_size)
    if not rank.is_nodes or engine == FASTERTRANSFORMER or count < 2 or rest:
        return [rank]
    first = rank.rank * count
    one = dataclasses.replace(rank, world_size=ranks, local_size=count)
    return [dataclasses.replace(one, rank=first + local, local_rank=local) for local in range(count)]


def check_world_size(rank: Rank, models: Sequence[ServedModel], engine: str) -> None:
    """Make sure that the processes are as many as the model can be served by; one alone runs all ranks.

    Raises:
        ServerError: they are not, or there are several models for them.
    """
    if rank.world_size == 1:
        return
    if engine == FASTERTRANSFORMER:
        return _check_nodes(rank)
    if len(models) != 1:
        names = ", ".join(model.name for model in models)
        raise ServerError(
            f"{rank.world_size} processes can serve one model together, but the repository has {names}",
            "start one process, or serve the models one by one",
        )
    tensor, pipeline = models[0].tensor_para_size, models[0].pipeline_para_size
    if rank.world_size != tensor * pipeline:
        says = f"; {rank.said}" if rank.said_by else ""
        ranks = tensor * pipeline
        start = f"start {ranks} processes, one a rank (srun --ntasks={ranks}), or a single one, which runs all ranks"
        if ranks == 1:
            start = "start a single process (srun --ntasks=1)"
        raise ServerError(
            f"world_size ({rank.world_size}) should equal to tensor_para_size_ * pipeline_para_size_"
            f" ({tensor} * {pipeline} here){says}",
            f"{start}; or export again for other sizes",
        )


def _check_nodes(rank: Rank) -> None:
    """FasterTransformer's backend takes a process a node and finds the others by MPI; their number it checks itself."""
    if not rank.is_mpis:
        raise ServerError(
            f"{rank.said}, but FasterTransformer's backend joins processes "
            "through MPI alone: each would be a whole server",
            "start them with srun --mpi=pmix or mpirun, one a node",
        )


def engine_environment(rank: Rank, endpoint: Path, timeout_s: float) -> dict[str, str]:
    """Tell our engine what it is among several processes, or that it is alone whatever other variables say.

    Args:
        rank: of this process.
        endpoint: rank 0's endpoint file, on a filesystem that all share.
        timeout_s: seconds until all must have come.
    """
    if rank.world_size == 1:
        return {ENGINE_VARIABLE: ALONE}
    of_this_runner = () if rank.is_nodes else (RUN_VARIABLE,)  # each pod has a runner of its own
    run = [os.environ.get(name, "") for name in (*of_this_runner, *RUNS)]
    numbers = ("rank", "world_size", "local_rank", "local_size")
    place: dict[str, object] = {name: getattr(rank, name) for name in numbers}
    place["rendezvous"] = str(rendezvous_file(endpoint).absolute())
    return {ENGINE_VARIABLE: json.dumps(place | {"run": " ".join(run), "timeout_s": timeout_s})}
