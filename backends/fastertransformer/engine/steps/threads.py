"""How many threads torch computes with on a CPU: in the process, and in each step.

At the end of a product its threads wait for each other, which takes 10 us on idle cores and up to 60 us on cores that
other processes use too. Products that take no longer than that are computed by one thread. Measured on an AMD EPYC with
layers of 256 numbers (0.2 to 0.3 million a matrix): 27 us with one thread and 24 with two for one row, 89 and 55 for 32
rows; on two cores of a Xeon, one of them busy, 20 tokens took 57 ms with one thread and 93 with two.
"""

from __future__ import annotations

import os

import torch

from ..model.network import Network

_READ_NS, _MULTIPLY_NS = 0.14, 0.01  # of a number of a matrix: to read it, and to multiply it with a row
_WORTH_NS = 50e3


def choose_threads(wanted: int, local_size: int) -> int:
    """Choose the threads of a process: as many as wanted, else its part of the cores of ``local_size`` processes."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else torch.get_num_threads()
    return wanted or max(1, cores // local_size)


def begin_thread(threads: int, device: torch.device) -> None:
    """Prepare a thread that computes."""
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans again for every shape: 40 to 600 ms


class StepThreads:
    """Sets torch's number of threads for each step of a network on a CPU."""

    def __init__(self, network: Network) -> None:
        self._most = torch.get_num_threads()
        stacks = [stack for stack in (network.weights.decoder, network.weights.encoder) if stack and stack.layers]
        read_bytes = [layer.step_bytes for stack in stacks for layer in stack.layers]
        self._numbers = max(read_bytes, default=0) // network.weights.like.itemsize
        self._is_on_cpu = network.weights.like.device.type == "cpu"

    def fit(self, rows: int) -> None:
        """Choose one thread or all for a step of this many rows or tokens."""
        if self._is_on_cpu:
            is_worth_it = self._numbers * (_READ_NS + _MULTIPLY_NS * rows) > _WORTH_NS
            torch.set_num_threads(self._most if is_worth_it else 1)
