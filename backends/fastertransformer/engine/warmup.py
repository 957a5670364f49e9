"""Before the first request: compile what steps need on a GPU, and capture them; see graphs.py.

It happens when a model is loaded and takes seconds; beyond a limit it ends, and the steps that were not captured are
taken kernel by kernel.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from .graphs import SIZES
from .pages import PagedCache
from .steps import Steps

_LIMIT_S = 60.0
_INPUT_LENGTHS = (16, 64, 256, 1024)


@torch.inference_mode()
def warm_up(steps: Steps, limit_s: float = _LIMIT_S) -> str:
    """Warm up, if there is something to.

    Args:
        steps: that nobody uses yet.
        limit_s: seconds after which no more is begun.

    Returns:
        One line for a log; empty: there was nothing to do.
    """
    if steps.device.type != "cuda" or not isinstance(steps.cache, PagedCache):
        return ""
    start = time.perf_counter()
    done: list[int] = []
    for length in _INPUT_LENGTHS:
        if length <= steps.config.max_pos_seq_len:
            steps.extend(np.zeros((1, length), np.int64), np.zeros(1, np.int64), np.array([length]), 0, length)
    for size in reversed(SIZES):  # the largest first: the others fit into its memory
        if time.perf_counter() - start < limit_s:
            steps.capture(size)
            done.append(size)
    torch.cuda.synchronize(steps.device)
    missing = f", not of {sorted(set(SIZES) - set(done))} in time" if len(done) < len(SIZES) else ""
    return f"steps of up to {max(done, default=0)} rows captured in {time.perf_counter() - start:.1f} s{missing}"
