"""Warm-up: when a model is loaded, compile the kernels of its steps and capture these as CUDA graphs; see graphs.py.

This takes seconds, and stops at a limit; steps that were not captured until then run without graph replay. So do large
inputs whose GPU time exceeds the time that the host takes to launch their kernels: a graph would not help them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..arrays import Array
from .graphs import CONTINUED_TOKENS, MIXED_TOKENS, ROWS, TOKENS
from .steps import Steps

_LIMIT_S = 60.0
_MIXED_CHUNKS = 4  # in the largest captured mixed step: two contexts of two chunks' tokens that are run whole
_MIXED_SPARE = 128  # its tokens beside these
_INPUT_TOKENS = (16, 256, 1024, 2048)  # inputs of these sizes compile every kernel
_ALWAYS_TOKENS = 1024  # inputs up to this are always captured: a product of a new size is slow for the first time
_BUSY = 2  # larger inputs are not captured if their GPU time exceeds this many times their launch time
_CONTINUED = 32  # tokens of a row that is continued
_log = logging.getLogger(__name__)


@torch.inference_mode()
def warm_up(steps: Steps, limit_s: float = _LIMIT_S, mixed: int = 0) -> str:
    """Compile and capture the steps of a GPU.

    Args:
        steps: not in use yet.
        limit_s: seconds after which nothing more is captured.
        mixed: tokens of steps in which rows decode and a prompt is run in part; 0: there are none.

    Returns:
        One line for a log; empty where there is nothing to warm up.
    """
    ops = steps.network.ops
    if not ops.can_capture or not steps.network.weights.decoder:
        return ""
    start = time.perf_counter()
    deadline = start + limit_s
    _take_inputs(steps, deadline)
    if steps.network.weights.head:
        ops.warm_up_sampling(steps.config.vocab_size)
    if not steps.network.can_capture_decode:
        return "steps run without graph replay: some blocks of their layers are computed by torch"
    worth = _choose_tokens(steps, deadline)
    missing = []
    # The largest first: the others fit into its memory.
    most = min(max(worth, default=0), steps.cache.most_entries) if steps.network.can_capture_continued else 0
    continued = [tokens for tokens in CONTINUED_TOKENS if tokens <= most]  # padding is one row
    # A chunk's step, and those of contexts that are run whole, see scheduling/chunks.py.
    of_mixed = (
        {mixed, *(tokens for tokens in MIXED_TOKENS if tokens <= _MIXED_CHUNKS * mixed + _MIXED_SPARE)} if mixed else ()
    )
    sizes = [(0, 0, 0, tokens) for tokens in sorted(of_mixed, reverse=True) if tokens <= min(most, TOKENS[-1])]
    sizes += [*((rows, 0, 0, 0) for rows in reversed(ROWS)), *((0, tokens, 0, 0) for tokens in reversed(worth))]
    sizes += ((0, 0, more, 0) for more in reversed(continued))
    for size, is_adapted in [(size, is_adapted) for is_adapted in range(1 + (steps.places > 0)) for size in sizes]:
        if time.perf_counter() < deadline:
            steps.capture(*size, is_adapted)
        else:
            names = "rows", "tokens", "continuing tokens", "mixed tokens"
            missing += [f"{count} {name}" for count, name in zip(size, names, strict=True) if count]
    if worth and worth[-1] < TOKENS[-1] and time.perf_counter() < deadline:
        _take_largest(steps)
    torch.cuda.synchronize(steps.device)
    seconds = f"{time.perf_counter() - start:.1f} s"
    if missing:
        slow = "CUDA graphs not captured within %s: steps of %s run without graph replay, which is slower"
        _log.warning(slow, seconds, ", ".join(missing))
    inputs = f"inputs of up to {worth[-1]} tokens" if worth else "no inputs"
    return f"steps of up to {ROWS[-1]} rows and {inputs} captured in {seconds}"


def _take_inputs(steps: Steps, deadline: float) -> None:
    """Run inputs of new rows, and of rows that are continued."""
    for tokens in _INPUT_TOKENS:
        if time.perf_counter() >= deadline:
            return
        hidden = _take_input(steps, _rows_of(steps, tokens))
        if not steps.config.encoder:
            steps.predictions.argmax(hidden[-1:])
    if steps.config.encoder:
        steps.extend(*_rows_of(steps, _INPUT_TOKENS[0]), 0)
    longest = steps.config.max_pos_seq_len
    half = min(_CONTINUED, longest) // 2
    if half and steps.cache.bytes_of([(1, 2 * half, 0)]) <= steps.cache.budget_bytes:
        length, row, nothing = np.array([half]), steps.cache.allocator.take(2 * half), np.array([], np.int64)
        steps.slots.allocate(0, [row], length)
        steps.extend(np.zeros(half, np.int64), length, length, 0)
        steps.slots.clear(np.array(row.pages))  # the cache was uninitialized and may have given inf
        steps.slots.free(1, 0, nothing, nothing)
        steps.cache.allocator.release([row])


def _take_largest(steps: Steps) -> None:
    """Take the largest step that runs without a graph, for its memory: torch has released all that it held for reuse.

    It does so before each capture. To take memory from the driver waits until the GPU is idle.
    """
    rows, tokens = ROWS[-1], TOKENS[-1] - ROWS[-1]
    if steps.config.encoder or not steps.can_mix(rows, tokens):
        _take_input(steps, _rows_of(steps, TOKENS[-1]))
        return
    steps.mix(*_rows_of(steps, tokens), rows)
    steps.slots.resume(*np.zeros((2, rows), np.int64))


def _rows_of(steps: Steps, tokens: int) -> tuple[Array, Array, Array]:
    """Return ids, starts and lengths of new rows that have about this many tokens together."""
    rows = -(-tokens // steps.config.max_pos_seq_len)
    lengths = np.full(rows, tokens // rows)
    return np.zeros(lengths.sum(), np.int64), np.zeros_like(lengths), lengths


def _take_input(steps: Steps, rows: tuple[Array, Array, Array]) -> Tensor:
    """Run an input; returns its hidden states."""
    ids, starts, lengths = rows
    if steps.config.encoder:
        return steps.encode(ids, lengths, np.full_like(lengths, -1), 0)[0]
    return steps.extend(ids, starts, lengths, 0)


def _choose_tokens(steps: Steps, deadline: float) -> Sequence[int]:
    """Choose the input sizes to capture, by the launch time and the GPU time of the largest."""
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
