"""The operations of a network, with Triton's kernels, with those in C, or with torch; ops.py says what they are."""

from __future__ import annotations

from functools import lru_cache

import torch

from .host.compiled import host_kernels
from .host_ops import HostOps
from .kernels import can_run_on
from .ops import Ops


@lru_cache
def choose_ops(device: torch.device) -> Ops:
    """Choose the operations for a device: with kernels where they can be compiled, else torch's."""
    if can_run_on(device):
        from .triton_ops import TritonOps  # needs Triton, which torch for NVIDIA's GPUs brings along

        return TritonOps(device)
    return HostOps(device) if device.type == "cpu" and host_kernels() else Ops(device)
