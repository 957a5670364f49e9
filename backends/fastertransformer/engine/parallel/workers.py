"""Processes that an engine starts itself: one for each rank on this host, where nobody else has started them.

FasterTransformer runs a thread for each GPU of a node; here each has a process, with this one as rank 0. The others are
``worker.py``; they end when this one closes, or is gone (see lines.py).
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
_TOGETHER_S = 300.0  # until all have begun: the import of torch from a cold disk is slow
_FAREWELL_S = 20.0
_PACKAGES = (str(Path(__file__).resolve().parents[3]), str(Path(ft_format.__file__).resolve().parents[1]))


def needs_workers(settings: Settings, device: torch.device) -> bool:
    """Say whether each rank is to have a process: as told, else where each can have a GPU of its own."""
    size = settings.tensor_para_size * settings.pipeline_para_size
    if settings.has_process_per_rank is not None:
        return settings.has_process_per_rank and size > 1
    return device.type == "cuda" and 1 < size <= torch.cuda.device_count()


class WorkerProcesses:
    """The other ranks' processes.

    Args:
        settings: say how many there are.

    Attributes:
        ranks: of this process.
    """

    def __init__(self, settings: Settings) -> None:
        size = settings.tensor_para_size * settings.pipeline_para_size
        self._directory = tempfile.TemporaryDirectory(prefix="slipway-ranks-")
        rendezvous = str(Path(self._directory.name, "rendezvous"))
        places = [Ranks(rank, size, rank, size, rendezvous, rendezvous, _TOGETHER_S) for rank in range(size)]
        self.ranks = places[0]
        argv = [sys.executable, *WORKER]
        path = os.pathsep.join(filter(None, (*_PACKAGES, os.environ.get("PYTHONPATH"))))
        self._processes = [
            subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": path, VARIABLE: json.dumps(asdict(place))})
            for place in places[1:]
        ]

    def check(self) -> None:
        """Raise an EngineError where one of them has ended."""
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                raise EngineError(f"rank {rank} is lost: its process has ended with status {status}")

    def kill(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
        self.dismiss()

    def dismiss(self) -> None:
        """Wait until they have ended, which they have been told to."""
        for process in self._processes:
            try:
                process.wait(_FAREWELL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._directory.cleanup()
