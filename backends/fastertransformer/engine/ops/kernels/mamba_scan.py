"""Mamba 2's recurrence: one token of each row, packed rows, chunk after chunk, or packed drafts, token after token.

See ops/mamba_scan.py for formulas. A program has some elements of a head of one row, whose memory stays in registers
from the first token to the last. T: tokens; B: rows; H: heads; P: width of a head; G: groups of heads; N: numbers of
the memory for each element. State 0 belongs to no row and is left as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elements import softplus
from .launch import is_older
from .state_conv import PackedStates

_STEP_NUMBERS = 4096  # of the memory that a program has in a step
_WIDE = 128  # numbers of the memory for an element; above them chunks are short


class ScanTiles(NamedTuple):
    """How a scan is cut; with these, no register is spilled.

    Attributes:
        chunk: tokens that are computed together.
        block: elements of a head, or columns of its memory, that a program has.
        warps: of a program.
        precision: of products: ieee, or tf32, which rounds their numbers to 10 binary digits.
    """

    chunk: int
    block: int
    warps: int
    precision: str = "tf32"


EXACT, OLDER, _NEWER = ScanTiles(16, 16, 8, "ieee"), ScanTiles(16, 16, 4), ScanTiles(64, 32, 8)


class MambaSizes(NamedTuple):
    """The numbers that Mamba 2's kernels need of a layer.

    Attributes:
        heads, head_size, groups, memory_size: H, P, G and N.
        step_at: where dt is in a token's input.
        least_step: what dt is at least.
        step_bias, decay, skip: fp32 [H].
    """

    heads: int
    head_size: int
    groups: int
    memory_size: int
    step_at: int
    least_step: float
    step_bias: Tensor
    decay: Tensor
    skip: Tensor


@triton.jit
def _run_token(
    given, tokens, content, head, p, is_p, step_bias, decay, skip, heads, groups, step_at, least_step,
    head_size: tl.constexpr, memory_size: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Return a memory behind a token, and what the token reads of it."""
    n = tl.arange(0, width)
    is_n, inner = n < memory_size, heads * head_size
    step = softplus(tl.load(given + step_at + head).to(tl.float32) + tl.load(step_bias + head))
    step = tl.maximum(step, least_step)
    x = tl.load(tokens + head * head_size + p, is_p, 0.0)
    shared = tokens + inner + head // (heads // groups) * memory_size + n
    into, out_of = tl.load(shared, is_n, 0.0), tl.load(shared + groups * memory_size, is_n, 0.0)
    content = content * tl.exp(tl.load(decay + head) * step)
    content += (step * x)[:, None] * into[None, :]
    return content, tl.sum(content * out_of[None, :], 1) + tl.load(skip + head) * x


@triton.jit(do_not_specialize=("states",))
def _step(
    given, convolved, memory, states, step_bias, decay, skip, out, given_stride, heads, groups, step_at, least_step,
    head_size: tl.constexpr, memory_size: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row, head, p = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * block + tl.arange(0, block)
    n, is_p, state = tl.arange(0, width), p < head_size, tl.load(states + row)
    targets = out + (row * heads + head) * head_size + p
    if state == 0:
        tl.store(targets, tl.zeros((block,), tl.float32), is_p)
        return
    at = memory + ((state * heads + head) * head_size + p)[:, None] * memory_size + n[None, :]
    is_in = is_p[:, None] & (n < memory_size)[None, :]
    content, found = _run_token(
        given + row * given_stride, convolved + row * (heads * head_size + 2 * groups * memory_size),
        tl.load(at, is_in, 0.0), head, p, is_p, step_bias, decay, skip, heads, groups, step_at, least_step,
        head_size, memory_size, width,
    )  # fmt: skip
    tl.store(at, content, is_in)
    tl.store(targets, found, is_p)


@triton.jit(do_not_specialize=("states", "ends", "lasts", "stops"))
def _run_drafts(
    given, convolved, memory, states, ends, lasts, stops, step_bias, decay, skip, out, given_stride, heads, groups,
    step_at, least_step, head_size: tl.constexpr, memory_size: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Run a row's tokens as steps do; the memory becomes what it is behind the last one before the row's stop."""
    row, head, p = tl.program_id(0), tl.program_id(1), tl.program_id(2) * block + tl.arange(0, block)
    start, end, state = tl.load(ends + row).to(tl.int64), tl.load(lasts + row).to(tl.int64), tl.load(states + row)
    n, is_p, stop, inner = tl.arange(0, width), p < head_size, tl.load(stops + row), heads * head_size
    if state == 0:
        for token in range(start, end):
            tl.store(out + token * inner + head * head_size + p, tl.zeros((block,), tl.float32), is_p)
        return
    if start == end:
        return
    at = memory + ((state * heads + head) * head_size + p)[:, None] * memory_size + n[None, :]
    is_in = is_p[:, None] & (n < memory_size)[None, :]
    content = tl.load(at, is_in, 0.0)
    for token in range(start, end):
        content, found = _run_token(
            given + token * given_stride, convolved + token * (inner + 2 * groups * memory_size), content, head, p,
            is_p, step_bias, decay, skip, heads, groups, step_at, least_step, head_size, memory_size, width,
        )  # fmt: skip
        tl.store(out + token * inner + head * head_size + p, found, is_p)
        if token + 1 == stop:
            tl.store(at, content, is_in)


@triton.jit(do_not_specialize=("states", "positions", "ends"))
def _scan(
    given, convolved, memory, states, ends, positions, step_bias, decay, skip, out, given_stride, heads, groups,
    step_at, least_step, head_size: tl.constexpr, memory_size: tl.constexpr, chunk: tl.constexpr, block: tl.constexpr,
    width: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    row, head, p = tl.program_id(0), tl.program_id(1), tl.program_id(2) * block + tl.arange(0, block)
    start, end, state = tl.load(ends + row).to(tl.int64), tl.load(ends + row + 1).to(tl.int64), tl.load(states + row)
    n, place, is_p = tl.arange(0, width), tl.arange(0, chunk), p < head_size
    is_n, inner = n < memory_size, heads * head_size
    if state == 0:
        for begin in range(start, end, chunk):
            token = begin + place
            targets = out + (token * inner + head * head_size)[:, None] + p[None, :]
            tl.store(targets, tl.zeros((chunk, block), tl.float32), (token < end)[:, None] & is_p[None, :])
        return
    if start == end:
        return
    stride = inner + 2 * groups * memory_size
    shared_at = inner + head // (heads // groups) * memory_size
    bias, rate, through = tl.load(step_bias + head), tl.load(decay + head), tl.load(skip + head)
    at = memory + ((state * heads + head) * head_size + p)[:, None] * memory_size + n[None, :]
    is_in = is_p[:, None] & is_n[None, :]
    content = tl.load(at, is_in & (tl.load(positions + start) > 0), 0.0)
    for begin in range(start, end, chunk):
        token = begin + place
        is_token = token < end
        step = tl.load(given + token * given_stride + step_at + head, is_token, 0.0).to(tl.float32)
        step = tl.where(is_token, tl.maximum(softplus(step + bias), least_step), 0.0)
        faded = tl.cumsum(rate * step, 0)
        is_x, is_shared = is_token[:, None] & is_p[None, :], is_token[:, None] & is_n[None, :]
        tokens = convolved + (token * stride)[:, None]
        x = tl.load(tokens + head * head_size + p[None, :], is_x, 0.0)
        into = tl.load(tokens + shared_at + n[None, :], is_shared, 0.0)
        out_of = tl.load(tokens + shared_at + groups * memory_size + n[None, :], is_shared, 0.0)
        between = tl.where(place[:, None] >= place[None, :], faded[:, None] - faded[None, :], -float("inf"))
        scores = tl.dot(out_of, tl.trans(into), input_precision=precision) * tl.exp(between)
        added = x * step[:, None]
        found = tl.dot(out_of, tl.trans(content), input_precision=precision) * tl.exp(faded)[:, None]
        found += tl.dot(scores, added, input_precision=precision) + through * x
        targets = out + (token * inner + head * head_size)[:, None] + p[None, :]
        tl.store(targets, found, is_x)
        last = tl.sum(rate * step, 0)
        added *= tl.exp(last - faded)[:, None]
        content = content * tl.exp(last) + tl.dot(tl.trans(added), into, input_precision=precision)
    tl.store(at, content, is_in)


def step(given: Tensor, convolved: Tensor, sizes: MambaSizes, memory: Tensor, states: Tensor) -> Tensor:
    """Run one token of each row, and let the memories of the rows' states go on.

    Args:
        given: of a token, [B, any columns].
        convolved: x, B and C, fp32 [B, channels].
        sizes: of the layer.
        memory: of its states, fp32 [states, H, P, N].
        states: int64 [B].

    Returns:
        fp32 [B, H * P].
    """
    return _by_tokens(_step, given, convolved, sizes, memory, states)


def run_drafts(given: Tensor, convolved: Tensor, sizes: MambaSizes, memory: Tensor, packed: PackedStates) -> Tensor:
    """Run packed rows of few tokens as steps do; the memories go on by the tokens before the rows' stops; see scan."""
    states, ends, _, _, lasts, stops = packed
    return _by_tokens(_run_drafts, given, convolved, sizes, memory, states, ends, lasts, stops)


def _by_tokens(
    kernel: Any, given: Tensor, convolved: Tensor, sizes: MambaSizes, memory: Tensor, states: Tensor, *rows: Tensor
) -> Tensor:
    heads, size, groups, width, *numbers, step_bias, decay, skip = sizes
    padded = triton.next_power_of_2(width)
    block = min(triton.next_power_of_2(size), max(1, _STEP_NUMBERS // padded))
    out = torch.empty(len(given), heads * size, device=given.device)
    kernel[(len(states), heads, triton.cdiv(size, block))](
        given, convolved, memory, states, *rows, step_bias, decay, skip, out, given.stride(0), heads, groups, *numbers,
        head_size=size, memory_size=width, block=block, width=padded, num_warps=4,
    )  # fmt: skip
    return out


def scan(
    given: Tensor, convolved: Tensor, sizes: MambaSizes, memory: Tensor, packed: PackedStates, is_exact: bool
) -> Tensor:
    """Run packed rows, and let the memories of the rows' states go on.

    Args:
        given: see step; of T tokens.
        convolved: likewise.
        sizes: of the layer.
        memory: of its states.
        packed: the rows.
        is_exact: whether products are of fp32 numbers.

    Returns:
        fp32 [T, H * P].
    """
    heads, size, groups, width, *numbers, step_bias, decay, skip = sizes
    tiles = EXACT if is_exact else OLDER if is_older(given.device) or width > _WIDE else _NEWER
    block = min(max(16, triton.next_power_of_2(size)), tiles.block)
    out, (states, ends, positions, *_) = torch.empty(len(given), heads * size, device=given.device), packed
    _scan[(len(states), heads, triton.cdiv(size, block))](
        given, convolved, memory, states, ends, positions, step_bias, decay, skip, out, given.stride(0), heads, groups,
        *numbers, head_size=size, memory_size=width, chunk=tiles.chunk, block=block,
        width=max(16, triton.next_power_of_2(width)), precision=tiles.precision, num_warps=tiles.warps, num_stages=1,
    )  # fmt: skip
    return out
