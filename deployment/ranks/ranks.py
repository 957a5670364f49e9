"""A deployment of several processes: the first talks to clients, the others take part in what it computes.

FasterTransformer's backend joins the servers of all nodes through MPI: one process a node, each runs the same server,
those of the others with closed ports. Our engine takes one process a rank; those of the others run no server, see
``workers.py``. Which process this is, whoever has started it says in variables of its own; docs/serving.md has the rule
by which they are read. Standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from deployment.arguments import ServeArguments
from deployment.proof.served_models import ServedModel
from deployment.triton.installation import FASTERTRANSFORMER
from handover.endpoint import RUN_VARIABLE
from handover.errors import ServerError

ENGINE_VARIABLE = "SLIPWAY_RANKS"
"""Tells a process of our engine what it is; ``backends/fastertransformer/engine/parallel/rank.py`` reads it."""

ALONE = "alone"
"""Its value for a process that is alone."""

_RUN_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Only torchrun itself sets it; RANK and WORLD_SIZE may also be left over from a training script."""

_RUNS = ("PMIX_NAMESPACE", _RUN_OF_TORCHRUN)
_CLOSED = ("--allow-http=false", "--allow-grpc=false", "--allow-metrics=false")


@dataclasses.dataclass(frozen=True)
class Rank:
    """Which of the launched processes this is.

    Attributes:
        rank, world_size: of all.
        local_rank: of those on this node.
        local_size: how many are on this node; 1 where no variable says, as if each were on a node of its own.
        said_by: the variables that say so.
        is_mpis: MPI knows it too, without which FasterTransformer's backend finds no other process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    said_by: str = dataclasses.field(default="", compare=False)
    is_mpis: bool = dataclasses.field(default=True, compare=False)


@dataclasses.dataclass(frozen=True)
class _Launcher:
    """Variables of one kind of launcher; of several names the first counts that holds a number."""

    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    is_mpis: bool = True

    def claim(self, environment: Mapping[str, str]) -> Rank | None:
        """Read what it says; None where it says nothing, or not all."""
        rank, world_size = _number(environment, self.rank), _number(environment, self.world_size)
        if rank is None or world_size is None:
            return None
        names = [next(name for name in each if _is_number(environment, name)) for each in (self.rank, self.world_size)]
        local_rank, local_size = _number(environment, self.local_rank), _number(environment, self.local_size)
        return Rank(rank, world_size, local_rank or 0, local_size or 1, " and ".join(names), self.is_mpis)


_TORCHRUN = _Launcher(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), is_mpis=False)
_MPI = (
    _Launcher(
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Launcher(
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"),
    ),
    _Launcher(
        ("PMIX_RANK", "SLURM_PROCID"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
    ),
)


def find_rank(environment: Mapping[str, str]) -> Rank:
    """Find out which process this is; alone where no variable says.

    The innermost launcher counts: mpirun starts its processes below the tasks of srun, and torchrun below either. Of
    Slurm's variables those of a step count, since a batch script has some of them too and is no rank of anything.

    Raises:
        ServerError: what several say does not fit together.
    """
    is_step = "SLURM_STEP_ID" in environment or not environment.get("SLURM_JOB_ID")
    words = {name: value for name, value in environment.items() if is_step or not name.startswith("SLURM_")}
    outer = next(filter(None, (launcher.claim(words) for launcher in _MPI)), None)
    inner = _TORCHRUN.claim(words)
    if outer is None and inner is None and (number := _number(words, ("PMIX_RANK",))):
        raise _contradiction(f"PMIX_RANK is {number}, and nothing says of how many")
    rank = _innermost(outer, inner, is_torchrun=bool(words.get(_RUN_OF_TORCHRUN))) or Rank()
    if rank.rank >= rank.world_size:
        raise _contradiction(f"{rank.said_by} say {rank.rank} of {rank.world_size}")
    return rank


def _innermost(outer: Rank | None, inner: Rank | None, is_torchrun: bool) -> Rank | None:
    if outer is None or inner is None:
        return outer or inner
    if outer == inner or (inner.rank, inner.world_size) == (outer.rank, outer.world_size):
        return outer
    if is_torchrun or outer.world_size == 1:
        return inner
    if inner.world_size == 1:  # left over from a session of one process
        return outer
    raise _contradiction(", ".join(f"{rank.said_by} say {rank.rank} of {rank.world_size}" for rank in (outer, inner)))


def _contradiction(what: str) -> ServerError:
    return ServerError(
        f"it is not clear which of several processes this is: {what}",
        "start the server with srun, mpirun or torchrun, and unset the variables that are left from something else",
    )


def _is_number(environment: Mapping[str, str], name: str) -> bool:
    return _plain(environment.get(name, "")).isdigit()


def _number(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(_plain(environment[name])) for name in names if _is_number(environment, name)), None)


def _plain(value: str) -> str:
    return value.partition("(")[0].partition(",")[0]  # "2(x3),1": by node


def arguments_of(rank: int, arguments: ServeArguments) -> ServeArguments:
    """Return the arguments of a rank: other than the first, it has files and ports of its own."""
    if rank == 0:
        return arguments
    return dataclasses.replace(
        arguments,
        endpoint=arguments.endpoint.with_name(f"{arguments.endpoint.stem}.rank{rank}{arguments.endpoint.suffix}"),
        log=arguments.log.with_name(f"{arguments.log.stem}.rank{rank}{arguments.log.suffix}"),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        openai_port=None,
        server_args=(*arguments.server_args, *_CLOSED),
    )


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
        says = f"; {rank.said_by} say {rank.rank} of {rank.world_size}" if rank.said_by else ""
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
            f"{rank.said_by} say {rank.rank} of {rank.world_size}, but FasterTransformer's backend joins processes "
            "through MPI alone: each would be a whole server",
            "start them with srun --mpi=pmix or mpirun, one a node",
        )


def rendezvous_file(endpoint: Path) -> Path:
    """File in which rank 0 tells the others where it is, beside its endpoint file."""
    return endpoint.with_name(f".{endpoint.name}.ranks")


def engine_environment(rank: Rank, endpoint: Path, timeout_s: float) -> dict[str, str]:
    """Tell our engine what it is among several processes, or that it is alone whatever other variables say.

    Args:
        rank: of this process.
        endpoint: rank 0's endpoint file, on a filesystem that all share.
        timeout_s: seconds until all must have come.
    """
    if rank.world_size == 1:
        return {ENGINE_VARIABLE: ALONE}
    run = [os.environ.get(name, "") for name in (RUN_VARIABLE, "SLURM_JOB_ID", "SLURM_STEP_ID", *_RUNS)]
    numbers = ("rank", "world_size", "local_rank", "local_size")
    place: dict[str, object] = {name: getattr(rank, name) for name in numbers}
    place["rendezvous"] = str(rendezvous_file(endpoint).absolute())
    return {ENGINE_VARIABLE: json.dumps(place | {"run": " ".join(run), "timeout_s": timeout_s})}
