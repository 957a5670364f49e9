"""Keys of ``cluster``: where jobs run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from handover.ranges import GPUS, PROCESSES, number
from launcher.config.choices import ContainerRuntime
from models.checks import Range


@dataclass
class ClusterConfig:
    """Where jobs run. Slurm's keys are ignored by the other cluster types."""

    partition: str | None = None
    account: str | None = None
    exclusive: bool = True
    gpus_per_task: int | None = number(None, GPUS)
    gpus_per_node: int | None = number(None, GPUS)  # None: what this machine has
    gpu_type: str | None = None  # of plans=export: what launchers call the GPU, such as H100
    mem: int = number(0, Range(0, 1_000_000_000))  # MB per node; 0: all
    cpus_per_task: int | None = number(None, PROCESSES)  # None: 4 for each task, with exclusive all
    overcommit: bool = False
    job_name_prefix: str = "nemo-megatron-"
    nodes: int | None = number(None, Range(1, 65_536))  # upper limit; None: as many as TP x PP fill
    one_task_per_rank: bool = False  # the drop-in engine gets one task for each rank; False: one process joins them
    setup: list[str] = field(default_factory=list)  # lines of the sbatch file before the command
    srun_args: list[str] = field(default_factory=list)  # more flags for each srun
    container_runtime: ContainerRuntime = ContainerRuntime.pyxis  # none: on the host, whatever container says
    container_args: list[str] = field(default_factory=list)  # more flags for docker run and apptainer exec
    additional_parameters: dict[str, Any] = field(default_factory=dict)  # any other sbatch option
