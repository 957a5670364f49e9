"""The rank of this process, which its launcher gives it in the environment variable SLIPWAY_RANKS."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import EngineError

VARIABLE = "SLIPWAY_RANKS"
ALONE = "alone"  # value of VARIABLE for a process that is alone, whatever a launcher's variables say
LAUNCHER_VARIABLES = (  # of common launchers: rank, and number of processes
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("RANK", "WORLD_SIZE"),
    ("LWS_WORKER_INDEX", "LWS_GROUP_SIZE"),
    ("PET_NODE_RANK", "PET_NNODES"),
    ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    ("LEPTON_JOB_WORKER_INDEX", "LEPTON_JOB_TOTAL_WORKERS"),
    ("JOB_COMPLETION_INDEX", "SLIPWAY_NODES"),
)


@dataclass(frozen=True)
class Ranks:
    """The rank of one of several processes."""

    rank: int  # among all processes
    world_size: int
    local_rank: int  # among the processes of this host
    local_size: int
    rendezvous: str  # file on a filesystem that all processes share; rank 0 writes it
    run: str  # distinguishes this start from earlier ones with the same file
    timeout_s: float  # until all must have connected
    silence_s: float = 20.0  # without a heartbeat, after which a rank is lost

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks run on this host."""
        return self.local_size == self.world_size


def read_ranks(environment: Mapping[str, str]) -> Ranks | None:
    """Read SLIPWAY_RANKS, a JSON object of Ranks' attributes; None where it is not set, or says ``alone``."""
    text = environment.get(VARIABLE)
    try:
        return Ranks(**json.loads(text)) if text and text != ALONE else None
    except (ValueError, TypeError) as error:
        raise EngineError(f"{VARIABLE} = {text} is not what it must be: {error}") from error


def refuse_unassigned_rank(environment: Mapping[str, str], size: int) -> None:
    """Raise an EngineError if this is one of several processes of a launcher, and no variable says which rank it is.

    ``srun --ntasks=2 tritonserver`` by hand starts two servers, each with the whole model, where one model over two
    processes was intended. A model of ``size`` 1 may be served any number of times.
    """
    if size == 1 or environment.get(VARIABLE):
        return
    for rank, count in LAUNCHER_VARIABLES:
        is_step = not rank.startswith("SLURM_") or "SLURM_STEP_ID" in environment  # a batch script has no step
        told = environment.get(rank, ""), environment.get(count, "")
        if is_step and all(each.isdigit() for each in told) and int(told[1]) > 1:
            raise EngineError(
                f"this server is process {told[0]} of {told[1]} ({rank}, {count}), and the model has {size} ranks: "
                "each process would serve all of it. Start `python3 -m deployment.serve` in place of tritonserver: its "
                f"processes share the model; or start one process; or set {VARIABLE}={ALONE} for servers that have "
                "nothing to do with each other"
            )
