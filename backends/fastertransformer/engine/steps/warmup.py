"""Before the first request: compile what steps need on a GPU, and capture them; see graphs.py.

It happens when a model is loaded and takes seconds; beyond a limit it ends, and the steps that were not captured are
taken kernel by kernel. So are large inputs that keep the GPU busy for longer than the host takes to launch them: these
are better not padded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..cache.sizing import UNBOUNDED
from ..request.parse import Array
from .graphs import ROWS, TOKENS
from .steps import Steps

_LIMIT_S = 60.0
_INPUT_TOKENS = (16, 256, 1024, 2048)  # that make every kernel be compiled
_ALWAYS_TOKENS = 1024  # of inputs that are captured in any case: a product of a new size is slow for the first time
_BUSY = 2  # larger ones are not if the GPU is busy with them for so many times as long as the host launches them
_CONTINUED = 32  # tokens of a row that goes on
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
    ops = steps.network.ops
    if not ops.can_capture or not steps.network.weights.decoder:
        return ""
    start = time.perf_counter()
    deadline = start + limit_s
    _take_inputs(steps, deadline)
    if steps.network.weights.head:
        ops.warm_up_sampling(steps.config.vocab_size)
    worth = _choose_tokens(steps, deadline)
    missing = []
    # The largest first: the others fit into its memory.
    for rows, tokens in [*((rows, 0) for rows in reversed(ROWS)), *((0, tokens) for tokens in reversed(worth))]:
        if time.perf_counter() < deadline:
            steps.capture(rows, tokens)
        else:
            missing.append(f"{rows} rows" if rows else f"{tokens} tokens")
    torch.cuda.synchronize(steps.device)
    seconds = f"{time.perf_counter() - start:.1f} s"
    if missing:
        _log.warning(
            "not captured within %s: steps of %s; they are taken kernel by kernel", seconds, ", ".join(missing)
        )
    inputs = f"of up to {worth[-1]} tokens" if worth else "of none, which are run kernel by kernel,"
    return f"steps of up to {ROWS[-1]} rows and inputs {inputs} captured in {seconds}"


def _take_inputs(steps: Steps, deadline: float) -> None:
    """Take steps of several tokens of a row, by all the ways that there are: new ones, and those that go on."""
    for tokens in _INPUT_TOKENS:
        if time.perf_counter() >= deadline:
            return
        hidden = _take_input(steps, _rows_of(steps, tokens))
        if not steps.config.encoder:
            steps.argmax(hidden[-1:])
    if steps.config.encoder:
        steps.extend(*_rows_of(steps, _INPUT_TOKENS[0]), 0)
    longest = steps.config.max_pos_seq_len
    half = min(_CONTINUED, longest) // 2
    if half and steps.cache.bytes_of([(1, 2 * half, 0)]) <= steps.cache.budget_bytes:
        length, nothing = np.array([half]), np.array([-1])
        steps.allocate(0, 2 * length, length, np.array([UNBOUNDED]), np.array([0]), nothing, nothing)
        steps.extend(np.zeros(half, np.int64), length, length, 0)
        steps.clear(np.array([0]))  # what these made of nothing may be infinite
        steps.free(1, 0, nothing[:0], nothing[:0])


def _rows_of(steps: Steps, tokens: int) -> tuple[Array, Array, Array]:
    """Give ids, starts and lengths of new rows that have so many tokens together, or nearly."""
    rows = -(-tokens // steps.config.max_pos_seq_len)
    lengths = np.full(rows, tokens // rows)
    return np.zeros(lengths.sum(), np.int64), np.zeros_like(lengths), lengths


def _take_input(steps: Steps, rows: tuple[Array, Array, Array]) -> Tensor:
    """Run an input, and give what becomes of it."""
    ids, starts, lengths = rows
    if steps.config.encoder:
        return steps.encode(ids, lengths, np.full_like(lengths, -1), 0)[0]
    return steps.extend(ids, starts, lengths, 0)


def _choose_tokens(steps: Steps, deadline: float) -> Sequence[int]:
    """Say for how many tokens inputs are worth being captured, by how long one takes the host and the GPU."""
    if not steps.network.can_capture:
        return []
    if time.perf_counter() >= deadline:
        return TOKENS
    rows = _rows_of(steps, TOKENS[-1])
    torch.cuda.synchronize(steps.device)
    start = time.perf_counter()
    _take_input(steps, rows)
    launched_s = time.perf_counter() - start
    torch.cuda.synchronize(steps.device)
    part = launched_s / (time.perf_counter() - start)
    return [tokens for tokens in TOKENS if tokens <= max(_ALWAYS_TOKENS, _BUSY * part * TOKENS[-1])]
