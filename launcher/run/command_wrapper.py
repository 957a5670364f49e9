"""How a command is started where it runs: right here, as a step of a Slurm allocation, or through bcprun.

Standard library only: the runner on a job host uses it.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from launcher.plan.plan import PYTHON, Command, Resources
from launcher.run import containers
from launcher.run.process import PROJECT_DIR


@dataclass(frozen=True)
class Place:
    """Where commands run.

    Attributes:
        starter: ``child`` of this process, ``srun`` step of the allocation, or ``bcprun`` over a BCP job's nodes.
        directory: in which bcprun's processes and containers start; the others inherit ours.
        redirect: bcprun writes each process's output to a file of its own too.
        mounts: directories that a container sees at the same path.
        srun_args: more flags for each srun.
        runtime: of containers: pyxis, docker or apptainer.
        container_args: more flags for docker run and apptainer exec.
    """

    starter: str = "child"
    directory: str = "."
    redirect: bool = False
    mounts: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()
    runtime: str = "pyxis"
    container_args: tuple[str, ...] = ()

    def wrap(
        self, command: Command, resources: Resources, env: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[str, ...]:
        """Turn a command into the argv that starts it here.

        Args:
            command: what to start.
            resources: how many nodes, in which container.
            env: variables that bcprun and containers must be told; the others inherit them.
        """
        inside = resources.container is not None
        argv = command.argv if inside or command.argv[0] != PYTHON else (sys.executable, *command.argv[1:])
        if command.nodes is not None:
            resources = replace(resources, nodes=command.nodes)
        if self.starter == "child":
            return argv
        if self.starter == "bcprun":
            return self._bcprun(argv, command.tasks_per_node, resources.nodes, env)
        if resources.container is None:
            return (*self._srun(command, resources), *argv)
        return (*self._contained(command, resources, resources.container, env), *argv)

    def _srun(self, command: Command, resources: Resources, more: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Start a step on the first nodes of the allocation."""
        size = _size(resources.nodes, command.tasks_per_node)
        return ("srun", "--overlap", "--kill-on-bad-exit=1", "--mpi=pmix", *size, *more, *self.srun_args)

    def _contained(self, command: Command, resources: Resources, image: str, env: Mapping[str, str]) -> tuple[str, ...]:
        """Start in a container: srun's own flag, a program that srun starts, or docker under mpirun."""
        mounts = containers.outermost((*self.mounts, *resources.container_mounts))
        if self.runtime == "pyxis":
            return self._srun(command, resources, containers.pyxis(image, mounts, self.directory, env))
        with_gpus = resources.gpus_per_node > 0
        if self.runtime == "apptainer":
            prefix = containers.apptainer(image, mounts, self.directory, env, with_gpus, self.container_args)
            return (*self._srun(command, resources), *prefix)
        is_rank = resources.nodes * command.tasks_per_node > 1
        run = containers.docker(image, mounts, self.directory, env, is_rank, with_gpus, self.container_args)
        # A lone process needs no mpirun: the runner is on the first node already.
        return (*containers.mpirun(resources.nodes, command.tasks_per_node), *run) if is_rank else run

    def _bcprun(
        self, argv: tuple[str, ...], tasks_per_node: int, nodes: int, env: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Quote for the shell that bcprun gives its one string to; nothing else in the project needs one."""
        flags = ["bcprun", "--nnodes", str(nodes), "--npernode", str(tasks_per_node)]
        flags += [] if self.redirect else ["-no_redirect"]
        flags += [part for name, value in sorted(env.items()) for part in ("--env", f"{name}={value}")]
        return (*flags, "--cmd", f"cd {shlex.quote(self.directory)} && {shlex.join(argv)}")

    def clean_up_commands(self, resources: Sequence[Resources]) -> list[tuple[str, ...]]:
        """Commands at the end of a job: named containers would stay on its nodes."""
        if self.starter != "srun" or self.runtime != "pyxis":
            return []
        nodes: dict[str, int] = {}
        for each in resources:
            if each.container is not None:
                nodes[each.container] = max(nodes.get(each.container, 1), each.nodes)
        return [
            ("srun", "--overlap", *_size(count, 1), *containers.pyxis_removal(image)) for image, count in nodes.items()
        ]

    @property
    def stop_signals(self) -> tuple[signal.Signals, ...]:
        """What ends a command in good order, then at once.

        srun answers SIGTERM by killing its tasks with SIGKILL; SIGUSR1 it passes on to them, as mpirun and docker do.
        """
        return (signal.SIGUSR1, signal.SIGTERM) if self.starter == "srun" else (signal.SIGTERM,)

    def to_json(self) -> str:
        """Render for the runner's command line."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Place:
        """Inverse of ``to_json``."""
        content: dict[str, Any] = json.loads(text)
        tuples: dict[str, Any] = {name: tuple(value) for name, value in content.items() if isinstance(value, list)}
        return cls(**{**content, **tuples})


def interpreter_in(project: str) -> str:
    """Name this interpreter as the nodes know it, which may have the checkout, and what is installed in it, elsewhere.

    Args:
        project: the checkout as the nodes see it.
    """
    for directory in Path(sys.executable).parents:
        if directory.resolve() == PROJECT_DIR:
            return str(Path(project) / Path(sys.executable).relative_to(directory))
    return sys.executable


def _size(nodes: int, tasks_per_node: int) -> tuple[str, ...]:
    """Flags that say all of a step's size and what it inherits: what srun is not told, it takes from variables."""
    tasks = (f"--ntasks={nodes * tasks_per_node}", f"--ntasks-per-node={tasks_per_node}")
    return ("--relative=0", f"--nodes={nodes}", *tasks, "--export=ALL")
