"""A deployment of several processes: the first talks to clients, the others take part in what it computes.

FasterTransformer's backend joins the servers of all nodes through MPI: one process a node, each runs the same server,
those of the others with closed ports. Our engine takes one process a rank; those of the others run no server, see
``deployment.workers``. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from deployment.arguments import ServeArguments
from deployment.served_models import ServedModel
from handover.endpoint import RUN_VARIABLE
from handover.errors import ServerError

ENGINE_VARIABLE = "SLIPWAY_RANKS"
"""Tells a process of our engine what it is; ``backends/fastertransformer/engine/ranks/ranks.py`` reads it."""

_CLOSED = ("--allow-http=false", "--allow-grpc=false", "--allow-metrics=false")
_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE")


@dataclasses.dataclass(frozen=True)
class Rank:
    """Which of the launched processes this is.

    Attributes:
        rank, world_size: of all.
        local_rank, local_size: of those on this node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


def find_rank(environment: Mapping[str, str]) -> Rank:
    """Find out from MPI's variables, else from Slurm's; alone outside of both.

    Slurm sets its variables in a batch script too, which is no rank of anything: a step has SLURM_STEP_ID.
    """
    is_step = "SLURM_STEP_ID" in environment or not environment.get("SLURM_JOB_ID")
    words = {name: value for name, value in environment.items() if is_step or not name.startswith("SLURM_")}
    rank = _first_number(words, _RANK, 0)
    world_size = _first_number(words, _WORLD_SIZE, rank + 1)
    local_rank = _first_number(words, _LOCAL_RANK, 0)
    return Rank(rank, world_size, local_rank, _first_number(words, _LOCAL_SIZE, local_rank + 1))


def _first_number(environment: Mapping[str, str], names: Sequence[str], default: int) -> int:
    values = (environment.get(name, "").partition("(")[0].partition(",")[0] for name in names)  # "2(x3),1": by node
    return next((int(value) for value in values if value.isdigit()), default)


def arguments_of(rank: int, arguments: ServeArguments) -> ServeArguments:
    """Give a rank other than the first files and ports of its own."""
    if rank == 0:
        return arguments
    return dataclasses.replace(
        arguments,
        endpoint=arguments.endpoint.with_name(f"{arguments.endpoint.stem}.rank{rank}{arguments.endpoint.suffix}"),
        log=arguments.log.with_name(f"{arguments.log.stem}.rank{rank}{arguments.log.suffix}"),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        server_args=(*arguments.server_args, *_CLOSED),
    )


def check_world_size(rank: Rank, models: Sequence[ServedModel]) -> None:
    """Make sure that the processes of our engine are as many as the model has ranks; one alone runs all ranks.

    Raises:
        ServerError: they are not, or there are several models for them.
    """
    if rank.world_size == 1:
        return
    if len(models) != 1:
        names = ", ".join(model.name for model in models)
        raise ServerError(
            f"{rank.world_size} processes can serve one model together, but the repository has {names}",
            "start one process, or serve the models one by one",
        )
    tensor, pipeline = models[0].tensor_para_size, models[0].pipeline_para_size
    if rank.world_size != tensor * pipeline:
        raise ServerError(
            f"world_size ({rank.world_size}) should equal to tensor_para_size_ * pipeline_para_size_"
            f" ({tensor} * {pipeline} here)",
            f"start {tensor * pipeline} processes, one a rank (srun --ntasks={tensor * pipeline}), or a single one, "
            "which runs all ranks; or export again for other sizes",
        )


def rendezvous_file(endpoint: Path) -> Path:
    """File in which rank 0 tells the others where it is, beside its endpoint file."""
    return endpoint.with_name(f".{endpoint.name}.ranks")


def engine_environment(rank: Rank, endpoint: Path, timeout_s: float) -> dict[str, str]:
    """Tell our engine what it is among several processes.

    Args:
        rank: of this process.
        endpoint: rank 0's endpoint file, on a filesystem that all share.
        timeout_s: seconds until all must have come.
    """
    run = [os.environ.get(name, "") for name in (RUN_VARIABLE, "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")]
    place = dataclasses.asdict(rank) | {"rendezvous": str(rendezvous_file(endpoint).absolute())}
    return {ENGINE_VARIABLE: json.dumps(place | {"run": " ".join(run), "timeout_s": timeout_s})}
