"""Variables that would make a job another one according to the session in which it is submitted.

Slurm's programs read variables as if they were flags, and what a session of srun, mpirun or torchrun has of them is
about that session. Standard library only: the runner on a job host uses it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

_OF_A_SESSION = re.compile(
    r"SLURM\w*|(?:SBATCH|SALLOC|SRUN|SQUEUE|SACCT|SCANCEL|SINFO|SPANK|SUBMITIT)_\w+"
    r"|(?:PMIX?|PMI2|OMPI|PRTE|TORCHELASTIC)_\w+|MPI_LOCAL(?:RANKID|NRANKS)"
    r"|(?:(?:LOCAL|GROUP|ROLE|NODE)_)?RANK|(?:(?:LOCAL|GROUP|ROLE)_)?WORLD_SIZE|MASTER_(?:ADDR|PORT)"
    r"|(?:LWS|PET|SKYPILOT|LEPTON_JOB)_\w+|JOB_COMPLETION_INDEX|SLIPWAY_NODES"
    r"|(?:CUDA|ROCR|HIP)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
)
"""Flags of Slurm's programs by another name, the rank that a process is, and the GPUs that it was given."""

_OF_THE_CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT", "SLURM_SACK_SOCKET")
"""Where Slurm is and who asks it: the same in each session."""

_OF_A_SIZE = re.compile(
    r"SLURM_(?:NTASKS|NPROCS|NTASKS_PER_\w+|(?:MEM|CPUS|TRES|GPUS)_PER_\w+|TRES_BIND|GPUS|(?:STEP_)?GRES|EXPORT_ENV)"
    r"|SRUN_\w+"
)
"""What sbatch tells a batch script of the job's size, and srun then takes for the size of each of its steps.

``TRES_BIND`` is how Slurm 24.11 makes ``--gpus-per-task`` hide a node's other GPUs from a task.
"""

DEFAULTS = ("account", "partition", "qos", "reservation", "wckey")
"""Options of which ``SBATCH_<NAME>`` is the user's default: who pays and where, which many clusters ask to export."""


def for_clients(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for sbatch, squeue and the like, which are then the same whatever session they are started in."""
    return {
        name: value
        for name, value in environment.items()
        if name in _OF_THE_CLUSTER or not _OF_A_SESSION.fullmatch(name)
    }


def defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """The user's defaults for sbatch, by option."""
    given = {option: environment.get(f"SBATCH_{option.upper()}", "") for option in DEFAULTS}
    return {option: value for option, value in given.items() if value}


def unread(environment: Mapping[str, str]) -> list[str]:
    """Names of the variables that sbatch would read, and here does not."""
    read = {f"SBATCH_{option.upper()}" for option in DEFAULTS}
    return sorted(name for name in environment if name.startswith("SBATCH_") and name not in read)


def forget_size(environment: MutableMapping[str, str]) -> None:
    """Drop what says how large the job is: each step states its own size, and what it hands on."""
    for name in [name for name in environment if _OF_A_SIZE.fullmatch(name)]:
        del environment[name]
