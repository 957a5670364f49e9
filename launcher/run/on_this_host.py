"""Several processes of one command on this host, as srun starts them on nodes: each is told which it is.

``python3 -m launcher.run.on_this_host --processes=2 -- PROGRAM ...``. They are told by the variables of MPICH's mpirun,
and have the GPUs of this host divided among them. When one fails the others have a while to end by themselves, as they
do where they watch each other. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from handover.parent import end_with_parent
from handover.slurm_variables import for_clients
from launcher.plan.plan import Resources
from launcher.run.place import Place

_GPUS = "CUDA_VISIBLE_DEVICES"
_POLL_S = 0.1
_PATIENCE_S = 30.0
"""For the others to end by themselves after one has failed, and once more after SIGTERM."""


@dataclass(frozen=True)
class ThisHost(Place):
    """This host alone, which stands for as many nodes as a stage takes."""

    starter = "host"

    def start(
        self, argv: Sequence[str], tasks_per_node: int, resources: Resources, env: Mapping[str, str]
    ) -> tuple[str, ...]:
        """Start one process directly, and those of several nodes side by side, each with its part of the GPUs."""
        if resources.nodes == 1:
            return tuple(argv)
        size = (
            f"--processes={resources.nodes * tasks_per_node}",
            f"--gpus={resources.gpus_per_node // tasks_per_node}",
        )
        return (sys.executable, "-m", "launcher.run.on_this_host", *size, "--", *argv)


def variables_of(rank: int, processes: int, gpus: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return all variables of one of the processes: without another launcher's words, with its own GPUs."""
    told = {"PMI_RANK": str(rank), "PMI_SIZE": str(processes)}
    told |= {"MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(processes)}
    if gpus:
        seen = environment.get(_GPUS) or ",".join(map(str, range(processes * gpus)))
        told[_GPUS] = ",".join(seen.split(",")[rank * gpus : (rank + 1) * gpus])
    elif _GPUS in environment:
        told[_GPUS] = environment[_GPUS]
    return {**for_clients(environment), **told}


class Processes:
    """The processes of one command."""

    def __init__(self, argv: Sequence[str], processes: int, gpus: int) -> None:
        self._processes = [
            subprocess.Popen(
                argv,
                env=variables_of(rank, processes, gpus, os.environ),
                stdin=subprocess.DEVNULL,
                preexec_fn=lambda: end_with_parent(signal.SIGTERM),
            )
            for rank in range(processes)
        ]

    def signal(self, number: int, frame: FrameType | None = None) -> None:
        """Pass a signal on to all that run."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> int:
        """Return the exit status of the first that has failed, or 0, once all have ended."""
        status, deadline, number = 0, float("inf"), signal.SIGTERM
        while running := [process for process in self._processes if process.poll() is None]:
            failed = [each.returncode for each in self._processes if each not in running and each.returncode]
            if failed and not status:
                status, deadline = failed[0], time.monotonic() + _PATIENCE_S
            if time.monotonic() > deadline:
                self.signal(number)
                deadline, number = time.monotonic() + _PATIENCE_S, signal.SIGKILL
            time.sleep(_POLL_S)
        status = status or next((each.returncode for each in self._processes if each.returncode), 0)
        return status if status >= 0 else 128 - status


def main(argv: Sequence[str]) -> int:
    """Start the command that many times, pass signals on, and wait."""
    parser = argparse.ArgumentParser(prog="launcher.run.on_this_host", description=main.__doc__)
    parser.add_argument("--processes", type=int, required=True, help="how many")
    parser.add_argument("--gpus", type=int, default=0, help="of each; 0: all have what this host has")
    parser.add_argument("command", nargs="+", help="program and arguments")
    options = parser.parse_args(list(argv))
    processes = Processes(options.command, options.processes, options.gpus)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, processes.signal)
    return processes.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
