"""Which of several processes this is: a table of what starts them, and the variables by which each says so.

docs/cluster.md has the rule by which they are read. A new one is a record in ``LAUNCHERS``. Standard library only.
"""

from __future__ import annotations

import dataclasses
import re
import string
from collections.abc import Mapping, Sequence

from handover.errors import ServerError

_RUN_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Only torchrun itself sets it; RANK and WORLD_SIZE may also be left over from a training script."""

RUNS = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", _RUN_OF_TORCHRUN),
    *("LWS_LEADER_ADDRESS", "SKYPILOT_TASK_ID", "LEPTON_JOB_NAME"),
)
"""What distinguishes one start of several processes from another."""

NODES_VARIABLE = "SLIPWAY_NODES"
"""How many pods an Indexed Job has, which Kubernetes does not tell them: the Job's manifest sets it."""

_FIRST_HOST = re.compile(r"(?:[^\s,\[]|\[[^\]]*\])*")
_FIRST_NUMBER = re.compile(r"\[(\d+)[^\]:]*\]")
"""Of Slurm's ``node[01-04,07],other``; the brackets of an IPv6 address have colons."""


@dataclasses.dataclass(frozen=True)
class Rank:
    """Which of the launched processes this is.

    Attributes:
        rank, world_size: of all.
        local_rank: of those on this node.
        local_size: how many are on this node; 1 where no variable says, as if each were on a node of its own.
        head: address or name of the first one's host; empty where no variable says.
        said_by: the variables that say so.
        is_mpis: MPI knows it too, without which FasterTransformer's backend finds no other process.
        is_nodes: a host or pod has one such process, below which another launcher may start more.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    head: str = dataclasses.field(default="", compare=False)
    said_by: str = dataclasses.field(default="", compare=False)
    is_mpis: bool = dataclasses.field(default=True, compare=False)
    is_nodes: bool = dataclasses.field(default=False, compare=False)

    @property
    def said(self) -> str:
        """What the variables say, for a message."""
        return f"{self.said_by} say {self.rank} of {self.world_size}"


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Variables of one kind of launcher; of several names the first counts that holds a number.

    Attributes:
        rank, world_size, local_rank, local_size: names of the variables.
        head: address of the first process's host, as a template of variables; the first of a list counts.
        is_mpis, is_nodes: see ``Rank``.
    """

    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    head: str = ""
    is_mpis: bool = False
    is_nodes: bool = False

    def claim(self, environment: Mapping[str, str]) -> Rank | None:
        """Read what it says; None where it says nothing, or not all."""
        rank, world_size = _number(environment, self.rank), _number(environment, self.world_size)
        if rank is None or world_size is None:
            return None
        names = [next(name for name in each if _is_number(environment, name)) for each in (self.rank, self.world_size)]
        local_rank, local_size = _number(environment, self.local_rank), _number(environment, self.local_size)
        try:
            head = first_host(string.Template(self.head).substitute(environment))
        except KeyError:
            head = ""
        place = (rank, world_size, local_rank or 0, local_size or 1)
        return Rank(*place, head, " and ".join(names), self.is_mpis, self.is_nodes)

    def missing(self, environment: Mapping[str, str]) -> str:
        """Return what is not said, where the rest says that there are several processes; else nothing."""
        rank, world_size = _number(environment, self.rank), _number(environment, self.world_size)
        told, others, unsaid = (self.rank, self.world_size, "of how many")
        if rank is None:
            told, others, unsaid = (self.world_size, self.rank, "which of them this is")
        if (rank is None) == (world_size is None) or (not rank and world_size in (None, 0, 1)):
            return ""
        name = next(name for name in told if _is_number(environment, name))
        return f"{name} is {environment[name]}, and nothing says {unsaid} ({' or '.join(others)} would)"


TORCHRUN = Launcher(("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",), "$MASTER_ADDR")
LAUNCHERS = (
    TORCHRUN,
    Launcher(
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        is_mpis=True,
    ),
    Launcher(  # MPICH's and Intel's mpirun, and srun --mpi=pmi2
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "SLURM_LOCALID"),
        ("MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"),
        "$SLURM_STEP_NODELIST",
        is_mpis=True,
    ),
    Launcher(
        ("PMIX_RANK", "SLURM_PROCID"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        "$SLURM_STEP_NODELIST",
        is_mpis=True,
    ),
    Launcher(("LWS_WORKER_INDEX",), ("LWS_GROUP_SIZE",), head="$LWS_LEADER_ADDRESS", is_nodes=True),
    Launcher(("PET_NODE_RANK",), ("PET_NNODES",), head="$PET_MASTER_ADDR", is_nodes=True),  # for torchrun to read
    Launcher(("SKYPILOT_NODE_RANK",), ("SKYPILOT_NUM_NODES",), head="$SKYPILOT_NODE_IPS", is_nodes=True),
    Launcher(
        ("LEPTON_JOB_WORKER_INDEX",),
        ("LEPTON_JOB_TOTAL_WORKERS",),
        head="$LEPTON_JOB_WORKER_PREFIX-0.$LEPTON_SUBDOMAIN",
        is_nodes=True,
    ),
    Launcher(("JOB_COMPLETION_INDEX",), (NODES_VARIABLE,), is_nodes=True),  # an Indexed Job of Kubernetes
)
"""From the innermost on: mpirun starts processes below the tasks of srun, torchrun below either, all within pods."""


def find_rank(environment: Mapping[str, str]) -> Rank:
    """Find out which process this is; alone where no variable says.

    The innermost launcher counts. Of Slurm's variables those of a step count, since a batch script has some of them too
    and is no rank of anything.

    Raises:
        ServerError: what several say does not fit together, or what one says is not all.
    """
    is_step = "SLURM_STEP_ID" in environment or not environment.get("SLURM_JOB_ID")
    words = {name: value for name, value in environment.items() if is_step or not name.startswith("SLURM_")}
    is_left_over = not words.get(_RUN_OF_TORCHRUN)
    found = None
    for launcher in LAUNCHERS:
        if claim := launcher.claim(words):
            found = _innermost(found, claim, is_left_over and found.said_by.startswith("RANK ")) if found else claim
    rank = found or Rank()
    if rank.rank >= rank.world_size:
        raise _unclear(rank.said)
    missing = list(filter(None, (launcher.missing(words) for launcher in LAUNCHERS)))
    if rank.world_size == 1 and missing:
        raise _unclear(missing[0])
    return rank


def _innermost(inner: Rank, outer: Rank, may_be_left_over: bool) -> Rank:
    """Choose between what two launchers say, of which the outer one has started the inner one.

    Args:
        inner: what the one says.
        outer: what the other says.
        may_be_left_over: the inner one's words may be those of something that has ended.
    """
    if (inner.rank, inner.world_size) == (outer.rank, outer.world_size):
        return outer if outer.is_mpis and not inner.is_mpis else inner
    if outer.world_size == 1:
        return inner
    if may_be_left_over and inner.world_size == 1:
        return outer
    is_on_this_host = inner.is_nodes or inner.local_size >= inner.world_size  # each outer process has such a group
    if may_be_left_over or is_on_this_host:
        raise _unclear(f"{outer.said}, {inner.said}")
    return inner


def _unclear(what: str) -> ServerError:
    return ServerError(
        f"it is not clear which of several processes this is: {what}",
        "start the server once a rank, by one of the launchers of docs/cluster.md, and unset the variables that are "
        "left from something else",
    )


def first_host(hosts: str) -> str:
    """Return the first host of a list with commas or lines, or of Slurm's form of one."""
    found = _FIRST_HOST.match(hosts.strip())
    return _FIRST_NUMBER.sub(r"\1", found[0]) if found else ""


def _is_number(environment: Mapping[str, str], name: str) -> bool:
    return _plain(environment.get(name, "")).isdigit()


def _number(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    return next((int(_plain(environment[name])) for name in names if _is_number(environment, name)), None)


def _plain(value: str) -> str:
    return value.partition("(")[0].partition(",")[0]  # "2(x3),1": by node
