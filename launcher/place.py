"""How a command is started where it runs: right here, or as a step of a Slurm allocation.

Standard library only: the runner on a job host uses it.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from launcher.plan import PYTHON, Command, Resources


@dataclass(frozen=True)
class Place:
    """Where commands run.

    Attributes:
        steps: start each command with srun; False: as a child of this process.
        mounts: directories that a container sees at the same path.
        srun_args: more flags for each srun.
    """

    steps: bool = False
    mounts: tuple[str, ...] = ()
    srun_args: tuple[str, ...] = ()

    def wrap(self, command: Command, resources: Resources) -> tuple[str, ...]:
        """Turn a command into the argv that starts it here."""
        inside = resources.container is not None
        argv = command.argv if inside or command.argv[0] != PYTHON else (sys.executable, *command.argv[1:])
        if not self.steps:
            return argv
        step = ["srun", "--overlap", "--kill-on-bad-exit=1", "--mpi=pmix"]
        step += [f"--nodes={resources.nodes}", f"--ntasks-per-node={command.tasks_per_node}"]
        if resources.container is not None:
            mounts = ",".join(f"{path}:{path}" for path in (*self.mounts, *resources.container_mounts))
            step += [f"--container-image={resources.container}", f"--container-mounts={mounts}"]
        return (*step, *self.srun_args, *argv)

    @property
    def stop_signals(self) -> tuple[signal.Signals, ...]:
        """What ends a command in good order, then at once.

        srun answers SIGTERM by killing its tasks with SIGKILL; SIGUSR1 it passes on to them.
        """
        return (signal.SIGUSR1, signal.SIGTERM) if self.steps else (signal.SIGTERM,)

    def to_json(self) -> str:
        """Render for the runner's command line."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Place:
        """Inverse of ``to_json``."""
        content: Mapping[str, list[str]] = json.loads(text)
        return cls(bool(content["steps"]), tuple(content["mounts"]), tuple(content["srun_args"]))
