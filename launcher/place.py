"""How a command is started where it runs: right here, as a step of a Slurm allocation, or through bcprun.

Standard library only: the runner on a job host uses it.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from launcher.plan import PYTHON, Command, Resources


@dataclass(frozen=True)
class Place:
    """Where commands run.

    Attributes:
        starter: ``child`` of this process, ``srun`` step of the allocation, or ``bcprun`` over a BCP job's nodes.
        directory: in which bcprun's processes start; the other starters inherit ours.
        redirect: bcprun writes each process's output to a file of its own too.
        mounts: directories that a container sees at the same path.
        srun_args: more flags for each srun.
    """

    starter: str = "child"
    directory: str = "."
    redirect: bool = False
    mounts: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()

    def wrap(
        self, command: Command, resources: Resources, env: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[str, ...]:
        """Turn a command into the argv that starts it here.

        Args:
            command: what to start.
            resources: how many nodes, in which container.
            env: variables that bcprun must be told; the others inherit them.
        """
        inside = resources.container is not None
        argv = command.argv if inside or command.argv[0] != PYTHON else (sys.executable, *command.argv[1:])
        if self.starter == "child":
            return argv
        if self.starter == "bcprun":
            return self._bcprun(argv, command.tasks_per_node, resources.nodes, env)
        step = ["srun", "--overlap", "--kill-on-bad-exit=1", "--mpi=pmix"]
        step += ["--relative=0", f"--nodes={resources.nodes}", f"--ntasks-per-node={command.tasks_per_node}"]
        if resources.container is not None:
            mounts = ",".join(f"{path}:{path}" for path in (*self.mounts, *resources.container_mounts))
            step += [f"--container-image={resources.container}", f"--container-mounts={mounts}"]
        return (*step, *self.srun_args, *argv)

    def _bcprun(
        self, argv: tuple[str, ...], tasks_per_node: int, nodes: int, env: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Quote for the shell that bcprun gives its one string to; nothing else in the project needs one."""
        flags = ["bcprun", "--nnodes", str(nodes), "--npernode", str(tasks_per_node)]
        flags += [] if self.redirect else ["-no_redirect"]
        flags += [part for name, value in sorted(env.items()) for part in ("--env", f"{name}={value}")]
        return (*flags, "--cmd", f"cd {shlex.quote(self.directory)} && {shlex.join(argv)}")

    @property
    def stop_signals(self) -> tuple[signal.Signals, ...]:
        """What ends a command in good order, then at once.

        srun answers SIGTERM by killing its tasks with SIGKILL; SIGUSR1 it passes on to them.
        """
        return (signal.SIGUSR1, signal.SIGTERM) if self.starter == "srun" else (signal.SIGTERM,)

    def to_json(self) -> str:
        """Render for the runner's command line."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Place:
        """Inverse of ``to_json``."""
        content: dict[str, Any] = json.loads(text)
        content["mounts"], content["srun_args"] = tuple(content["mounts"]), tuple(content["srun_args"])
        return cls(**content)
