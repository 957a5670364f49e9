"""Processes that an engine starts itself: one for each rank on this host, where nobody else has started them.

FasterTransformer runs a thread for each GPU of a node; here each has a process, with this one as rank 0. The others are
``worker.py``; they end when this one closes, or is gone (see ranks.Watch).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from ..settings import Settings
from .ranks import VARIABLE, Ranks

WORKER = ("-m", "fastertransformer.worker")
_TOGETHER_S = 300.0  # until all have begun: the import of torch from a cold disk is slow
_FAREWELL_S = 20.0
_POLL_S = 0.5
_GRACE_S = 5.0  # for an error that says more
_PACKAGES = Path(__file__).resolve().parents[3]


def needs_crew(settings: Settings, device: torch.device) -> bool:
    """Say whether each rank is to have a process: as told, else where each can have a GPU of its own."""
    size = settings.tensor_para_size * settings.pipeline_para_size
    if settings.has_process_per_rank is not None:
        return settings.has_process_per_rank and size > 1
    return device.type == "cuda" and 1 < size <= torch.cuda.device_count()


class Crew:
    """The other ranks' processes.

    Args:
        settings: say how many there are.

    Attributes:
        ranks: of this process.
        on_end: is called with what has happened where one of them has ended that should not; None: this process ends.
    """

    on_end: Callable[[str], None] | None = None

    def __init__(self, settings: Settings) -> None:
        size = settings.tensor_para_size * settings.pipeline_para_size
        self._directory = tempfile.TemporaryDirectory(prefix="slipway-ranks-")
        rendezvous = str(Path(self._directory.name, "rendezvous"))
        places = [Ranks(rank, size, rank, size, rendezvous, rendezvous, _TOGETHER_S) for rank in range(size)]
        self.ranks = places[0]
        argv = [sys.executable, *WORKER]
        path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
        self._processes = [
            subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": path, VARIABLE: json.dumps(asdict(place))})
            for place in places[1:]
        ]
        self._is_over = threading.Event()
        threading.Thread(target=self._watch, name="crew", daemon=True).start()

    def _watch(self) -> None:
        """End this process too where another has ended and nobody has noticed: nothing must wait for it for ever."""
        while all(process.poll() is None for process in self._processes):
            if self._is_over.wait(_POLL_S):
                return
        if self.on_end and not self._is_over.is_set():
            rank = next(rank for rank, each in enumerate(self._processes, 1) if each.poll() is not None)
            self.on_end(f"rank {rank} is lost: its process has ended with status {self._processes[rank - 1].poll()}")
        elif not self._is_over.wait(_GRACE_S):
            sys.stderr.write("fastertransformer: a rank's process has ended; what it said is above\n")
            sys.stderr.flush()
            os._exit(1)

    def kill(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
        self.dismiss()

    def dismiss(self) -> None:
        """Wait until they have ended, which they have been told to."""
        self._is_over.set()
        for process in self._processes:
            try:
                process.wait(_FAREWELL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._directory.cleanup()
