"""Worker processes: an engine starts one for each other rank on this host, unless a launcher has started them.

FasterTransformer runs a thread for each GPU of a node; here each has a process, with this one as rank 0. The others are
``worker.py``; they end when this one closes or is lost (see control.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

import ft_format

from ..errors import EngineError
from ..settings import Settings
from .rank import VARIABLE, Ranks

WORKER = ("-m", "fastertransformer.worker")
_STARTUP_S = 300.0  # until all have connected: the import of torch from a cold disk is slow
_SHUTDOWN_S = 20.0
_PACKAGES = (str(Path(__file__).resolve().parents[3]), str(Path(ft_format.__file__).resolve().parents[1]))


def needs_workers(settings: Settings, device: torch.device) -> bool:
    """Return whether each rank gets a process: by the settings, or else if each can have a GPU of its own."""
    can_have_gpu = device.type == "cuda" and settings.world_size <= torch.cuda.device_count()
    is_wanted = can_have_gpu if settings.has_process_per_rank is None else settings.has_process_per_rank
    return is_wanted and settings.world_size > 1


class WorkerProcesses:
    """The processes of all ranks but rank 0; ``ranks`` is this process's."""

    def __init__(self, settings: Settings) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="slipway-ranks-")
        rendezvous, size = str(Path(self._directory.name, "rendezvous")), settings.world_size
        self.ranks, *others = [
            Ranks(rank, size, rank, size, rendezvous, rendezvous, _STARTUP_S) for rank in range(size)
        ]
        path = os.pathsep.join(filter(None, (*_PACKAGES, os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path}
        self._processes = [
            subprocess.Popen([sys.executable, *WORKER], env=environment | {VARIABLE: json.dumps(asdict(other))})
            for other in others
        ]

    def check(self) -> None:
        """Raise an EngineError if a worker has ended."""
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                raise EngineError(f"rank {rank} is lost: its process has ended with status {status}")

    def kill(self) -> None:
        """Kill the workers."""
        for process in self._processes:
            process.kill()
        self.wait()

    def wait(self) -> None:
        """Wait until the workers have exited, as rank 0 has told them to."""
        for process in self._processes:
            try:
                process.wait(_SHUTDOWN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._directory.cleanup()
