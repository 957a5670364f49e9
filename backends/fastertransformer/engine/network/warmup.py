"""Before the first request: compile what steps need on a GPU, and capture them; see graphs.py.

It happens when a model is loaded and takes seconds; beyond a limit it ends, and the steps that were not captured are
taken kernel by kernel.
"""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from ..kernels import can_run_on
from .graphs import ROWS, TOKENS
from .steps import Steps

_LIMIT_S = 60.0
_INPUT_LENGTHS = (16, 256, 1024, 2048)
_log = logging.getLogger(__name__)


@torch.inference_mode()
def warm_up(steps: Steps, limit_s: float = _LIMIT_S) -> str:
    """Warm up, if there is something to.

    Args:
        steps: that nobody uses yet.
        limit_s: seconds after which no more is begun.

    Returns:
        One line for a log; empty: there was nothing to do.
    """
    if not can_run_on(steps.device) or not steps.network.weights.decoder:
        return ""
    start = time.perf_counter()
    for length in _INPUT_LENGTHS:
        if length <= steps.config.max_pos_seq_len:
            ids, lengths = np.zeros(length, np.int64), np.array([length])
            if steps.config.encoder:
                steps.encode(ids, lengths, np.array([-1]), 0)
            else:
                steps.choose(steps.extend(ids, np.zeros_like(lengths), lengths, 0)[-1:])
    if steps.network.weights.head:
        from ..kernels import draw

        draw.warm_up(steps.config.vocab_size, steps.device)
    has_contexts = steps.network.can_be_captured()
    # The largest first: the others fit into its memory.
    sizes = [(rows, 0) for rows in reversed(ROWS)] + [(0, tokens) for tokens in reversed(TOKENS) if has_contexts]
    missing = []
    for rows, tokens in sizes:
        if time.perf_counter() - start < limit_s:
            steps.capture(rows, tokens)
        else:
            missing.append(f"{rows} rows" if rows else f"{tokens} tokens")
    torch.cuda.synchronize(steps.device)
    seconds = f"{time.perf_counter() - start:.1f} s"
    if missing:
        _log.warning(
            "not captured within %s: steps of %s; they are taken kernel by kernel", seconds, ", ".join(missing)
        )
    inputs = f"of up to {TOKENS[-1]} tokens" if has_contexts else "of none, which are run kernel by kernel,"
    return f"steps of up to {ROWS[-1]} rows and inputs {inputs} captured in {seconds}"
