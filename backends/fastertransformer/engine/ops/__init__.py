"""The operations of a network, with Triton's kernels or with torch; ops.py says what they are."""

from __future__ import annotations

from functools import lru_cache

import torch

from .kernels import can_run_on
from .ops import Ops


@lru_cache
def choose_ops(device: torch.device) -> Ops:
    """Choose the operations for a device: Triton's kernels where they can be compiled, else torch."""
    if can_run_on(device):
        from .triton_ops import TritonOps  # needs Triton, which torch for NVIDIA's GPUs brings along

        return TritonOps(device)
    return Ops(device)
