"""Steps of a Slurm allocation: srun starts a command, alone or in a container. Standard library only."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

from handover.slurm_variables import forget_size
from launcher.plan.plan import Resources, outermost
from launcher.run.containers import RUNTIMES, Container
from launcher.run.place import Place

FIRST_NODE = "SLIPWAY_FIRST_NODE"
"""Where the runner is. In Slurm 24.11 ``--relative=0`` names no node: steps of one node take turns over all."""


@dataclass(frozen=True)
class SlurmSteps(Place):
    """Steps on the first nodes of the allocation.

    srun answers SIGTERM by killing its tasks with SIGKILL; SIGUSR1 it passes on to them, as mpirun and docker do.

    Attributes:
        mounts: directories that a container sees at the same path.
        srun_args: more flags for each srun.
        runtime: of containers, one of ``RUNTIMES``.
        container_args: more flags for docker run and apptainer exec.
    """

    starter = "srun"
    stop_signals = (signal.SIGUSR1, signal.SIGTERM)
    mounts: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    runtime: str = "pyxis"
    container_args: tuple[str, ...] = ()

    def start(
        self, argv: Sequence[str], tasks_per_node: int, resources: Resources, env: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Start a step, or a container in the runtime's way."""
        nodes = resources.nodes

        def step(*more: str) -> tuple[str, ...]:
            size = _size(nodes, tasks_per_node)
            return ("srun", "--overlap", "--kill-on-bad-exit=1", "--mpi=pmix", *size, *more, *self.srun_args)

        if resources.container is None:
            return (*step(), *argv)
        mounts = outermost((*self.mounts, *resources.container_mounts))
        with_gpus = resources.gpus_per_node > 0
        more = self.container_args
        container = Container(resources.container, mounts, self.directory, env, with_gpus, more, nodes, tasks_per_node)
        return (*RUNTIMES[self.runtime].start(container, step), *argv)

    def clean_up_commands(self, resources: Sequence[Resources]) -> list[tuple[str, ...]]:
        """Commands that remove named containers, which would stay on the job's nodes."""
        nodes: dict[str, int] = {}
        for each in resources:
            if each.container is not None:
                nodes[each.container] = max(nodes.get(each.container, 1), each.nodes)
        removals = ((count, RUNTIMES[self.runtime].removal(image)) for image, count in nodes.items())
        return [("srun", "--overlap", *_size(count, 1), *removal) for count, removal in removals if removal]

    def cancelling(self, jobs: Sequence[str]) -> list[tuple[str, ...]]:
        """Commands that cancel jobs."""
        return [("scancel", "--quiet", *jobs)] if jobs else []

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Forget the size of the job, which srun would take for that of each step, and note where its first node is."""
        forget_size(environment)
        environment[FIRST_NODE] = environment.get("SLURMD_NODENAME", "")


def _size(nodes: int, tasks_per_node: int) -> tuple[str, ...]:
    """Flags that say all of a step's size and what it inherits: what srun is not told, it takes from variables."""
    tasks = (f"--ntasks={nodes * tasks_per_node}", f"--ntasks-per-node={tasks_per_node}")
    first = os.environ.get(FIRST_NODE) if nodes == 1 else None
    where = f"--nodelist={first}" if first else "--relative=0"
    return (where, f"--nodes={nodes}", *tasks, "--export=ALL")
