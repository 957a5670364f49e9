"""The gated delta rule's recurrence: one token of each row, packed rows, or packed drafts, token after token.

See ops/delta_scan.py for formulas. Columns of a memory do not meet, so that a program has some of a head's. Of packed
rows, what a chunk's tokens are to each other is solved first, for all chunks at once; then each row goes from chunk to
chunk. T: tokens; B: rows; G: heads of queries and keys; H: heads of values; K, V: widths. State 0 belongs to no row and
is left as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elements import softplus
from .launch import is_older
from .mamba_scan import EXACT, OLDER, ScanTiles
from .row_blocks import BLOCK_FIELDS, PackedRows
from .state_conv import PackedStates

_COLUMNS = 32  # of a memory that a program has in a step
_NEWER = ScanTiles(32, 16, 4)
_EPS = tl.constexpr(1e-6)  # added to the square of a query's or key's length


class DeltaSizes(NamedTuple):
    """The numbers that the gated delta rule's kernels need of a layer.

    Attributes:
        key_heads, heads, key_size, value_size: G, H, K and V.
        learnt, forgotten: int32 [H], where in a token's rates it is how much is learnt and forgotten.
        step_bias, decay: fp32 [H].
    """

    key_heads: int
    heads: int
    key_size: int
    value_size: int
    learnt: Tensor
    forgotten: Tensor
    step_bias: Tensor
    decay: Tensor


@triton.jit
def _unit(x):
    """Give rows, [tokens, K], the length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + _EPS)[:, None]


@triton.jit
def _rates(rates, learnt, forgotten, step_bias, decay, head, is_in):
    """Return how much tokens learn, and the logarithm of how much is left, of the rates at some places."""
    learns = tl.sigmoid(tl.load(rates + tl.load(learnt + head), is_in, 0.0).to(tl.float32))
    step = tl.load(rates + tl.load(forgotten + head), is_in, 0.0).to(tl.float32) + tl.load(step_bias + head)
    return tl.where(is_in, learns, 0.0), tl.where(is_in, tl.load(decay + head) * softplus(step), 0.0)


@triton.jit
def _run_token(
    rates, tokens, content, head, v, is_v, learnt, forgotten, step_bias, decay, scale, key_heads, heads,
    key_size: tl.constexpr, value_size: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Return a memory behind a token, and what the token reads of it."""
    k, keys = tl.arange(0, width), key_heads * key_size
    is_k, shared = k < key_size, tokens + head // (heads // key_heads) * key_size + k
    query, key = tl.load(shared, is_k, 0.0), tl.load(shared + keys, is_k, 0.0)
    query *= tl.rsqrt(tl.sum(query * query, 0) + _EPS) * scale
    key *= tl.rsqrt(tl.sum(key * key, 0) + _EPS)
    value = tl.load(tokens + 2 * keys + head * value_size + v, is_v, 0.0)
    learns, fading = _rates(rates, learnt, forgotten, step_bias, decay, head, True)
    content = content * tl.exp(fading)
    content += key[:, None] * (learns * (value - tl.sum(key[:, None] * content, 0)))[None, :]
    return content, tl.sum(query[:, None] * content, 0)


@triton.jit(do_not_specialize=("states",))
def _step(
    rates, convolved, memory, states, learnt, forgotten, step_bias, decay, out, rates_stride, scale, key_heads, heads,
    key_size: tl.constexpr, value_size: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    row, head, v = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * block + tl.arange(0, block)
    k, is_v, state = tl.arange(0, width), v < value_size, tl.load(states + row)
    targets = out + (row * heads + head) * value_size + v
    if state == 0:
        tl.store(targets, tl.zeros((block,), tl.float32), is_v)
        return
    at = memory + ((state * heads + head) * key_size + k)[:, None] * value_size + v[None, :]
    is_in = (k < key_size)[:, None] & is_v[None, :]
    content, found = _run_token(
        rates + row * rates_stride, convolved + row * (2 * key_heads * key_size + heads * value_size),
        tl.load(at, is_in, 0.0), head, v, is_v, learnt, forgotten, step_bias, decay, scale, key_heads, heads, key_size,
        value_size, width,
    )  # fmt: skip
    tl.store(at, content, is_in)
    tl.store(targets, found, is_v)


@triton.jit(do_not_specialize=("states", "ends", "lasts", "stops"))
def _run_drafts(
    rates, convolved, memory, states, ends, lasts, stops, learnt, forgotten, step_bias, decay, out, rates_stride, scale,
    key_heads, heads, key_size: tl.constexpr, value_size: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """Run a row's tokens as steps do; the memory becomes what it is behind the last one before the row's stop."""
    row, head, v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * block + tl.arange(0, block)
    start, end, state = tl.load(ends + row).to(tl.int64), tl.load(lasts + row).to(tl.int64), tl.load(states + row)
    k, is_v, stop, inner = tl.arange(0, width), v < value_size, tl.load(stops + row), heads * value_size
    if state == 0:
        for token in range(start, end):
            tl.store(out + token * inner + head * value_size + v, tl.zeros((block,), tl.float32), is_v)
        return
    if start == end:
        return
    at = memory + ((state * heads + head) * key_size + k)[:, None] * value_size + v[None, :]
    is_in = (k < key_size)[:, None] & is_v[None, :]
    content = tl.load(at, is_in, 0.0)
    for token in range(start, end):
        content, found = _run_token(
            rates + token * rates_stride, convolved + token * (2 * key_heads * key_size + inner), content, head, v,
            is_v, learnt, forgotten, step_bias, decay, scale, key_heads, heads, key_size, value_size, width,
        )  # fmt: skip
        tl.store(out + token * inner + head * value_size + v, found, is_v)
        if token + 1 == stop:
            tl.store(at, content, is_in)


@triton.jit(do_not_specialize=("states", "tokens"))
def _solve(
    rates, convolved, states, blocks, rows, learnt, forgotten, step_bias, decay, solved, scores, rates_stride, scale,
    key_heads, heads, key_size: tl.constexpr, value_size: tl.constexpr, chunk: tl.constexpr, width: tl.constexpr,
    precision: tl.constexpr,
):  # fmt: skip
    """Write what queries read of keys, and what solves the system of what tokens learn, of a chunk and head."""
    blocks, head = blocks + tl.program_id(0) * BLOCK_FIELDS, tl.program_id(1)
    begin, length, first = tl.load(blocks).to(tl.int64), tl.load(blocks + 1), tl.load(blocks + 2)
    if length == 0:
        return
    if tl.load(states + tl.load(rows + begin)) == 0:
        return
    place, other, k = tl.arange(0, chunk), tl.arange(0, chunk), tl.arange(0, width)
    token, is_token, keys = begin + first + place, first + place < length, key_heads * key_size
    learns, fading = _rates(rates + token * rates_stride, learnt, forgotten, step_bias, decay, head, is_token)
    faded = tl.cumsum(fading, 0)
    shared = convolved + (token * (2 * keys + heads * value_size) + head // (heads // key_heads) * key_size)[:, None]
    is_in = is_token[:, None] & (k < key_size)[None, :]
    query, key = (
        _unit(tl.load(shared + k[None, :], is_in, 0.0)) * scale,
        _unit(tl.load(shared + keys + k[None, :], is_in, 0.0)),
    )
    # Transposed, [those before, those after]: a token's own numbers are a column, which the loop needs as one.
    between = tl.exp(tl.where(place[:, None] <= other[None, :], faded[None, :] - faded[:, None], -float("inf")))
    read = tl.dot(key, tl.trans(query), input_precision=precision) * between
    system = tl.dot(key, tl.trans(key), input_precision=precision) * between * learns[None, :]
    system = tl.where(place[:, None] < other[None, :], system, 0.0)
    inverse = tl.where(place[:, None] == other[None, :], 1.0, 0.0)
    for after in range(1, chunk):
        column = tl.sum(tl.where(other[None, :] == after, system, 0.0), 1)
        known = tl.sum(column[:, None] * inverse, 0)
        inverse -= tl.where(place[:, None] == after, known[None, :], 0.0)
    targets = ((token * heads + head) * chunk)[:, None] + other[None, :]
    tl.store(solved + targets, inverse, is_token[:, None])
    tl.store(scores + targets, tl.trans(read), is_token[:, None])


@triton.jit(do_not_specialize=("states", "positions", "ends"))
def _scan(
    rates, convolved, memory, states, ends, positions, learnt, forgotten, step_bias, decay, solved, scores, out,
    rates_stride, scale, key_heads, heads, key_size: tl.constexpr, value_size: tl.constexpr, chunk: tl.constexpr,
    block: tl.constexpr, width: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    row, head, v = tl.program_id(0), tl.program_id(1), tl.program_id(2) * block + tl.arange(0, block)
    start, end, state = tl.load(ends + row).to(tl.int64), tl.load(ends + row + 1).to(tl.int64), tl.load(states + row)
    k, place, is_v, keys = tl.arange(0, width), tl.arange(0, chunk), v < value_size, key_heads * key_size
    if state == 0:
        for begin in range(start, end, chunk):
            token = begin + place
            targets = out + ((token * heads + head) * value_size)[:, None] + v[None, :]
            tl.store(targets, tl.zeros((chunk, block), tl.float32), (token < end)[:, None] & is_v[None, :])
        return
    if start == end:
        return
    at = memory + ((state * heads + head) * key_size + k)[:, None] * value_size + v[None, :]
    is_in = (k < key_size)[:, None] & is_v[None, :]
    content = tl.load(at, is_in & (tl.load(positions + start) > 0), 0.0)
    for begin in range(start, end, chunk):
        token = begin + place
        is_token = token < end
        learns, fading = _rates(rates + token * rates_stride, learnt, forgotten, step_bias, decay, head, is_token)
        faded, last = tl.cumsum(fading, 0), tl.sum(fading, 0)
        tokens = convolved + (token * (2 * keys + heads * value_size))[:, None]
        shared = tokens + head // (heads // key_heads) * key_size + k[None, :]
        is_shared, is_value = is_token[:, None] & (k < key_size)[None, :], is_token[:, None] & is_v[None, :]
        key = _unit(tl.load(shared + keys, is_shared, 0.0))
        value = tl.load(tokens + 2 * keys + head * value_size + v[None, :], is_value, 0.0)
        held = tl.exp(faded)[:, None]
        wanted = value - held * tl.dot(key, content, input_precision=precision)
        matrix = ((token * heads + head) * chunk)[:, None] + place[None, :]
        inverse = tl.load(solved + matrix, is_token[:, None], 0.0)
        learning = tl.dot(inverse, wanted * learns[:, None], input_precision=precision)
        query = _unit(tl.load(shared, is_shared, 0.0)) * scale
        found = held * tl.dot(query, content, input_precision=precision)
        found += tl.dot(tl.load(scores + matrix, is_token[:, None], 0.0), learning, input_precision=precision)
        targets = out + ((token * heads + head) * value_size)[:, None] + v[None, :]
        tl.store(targets, found, is_value)
        key *= tl.exp(last - faded)[:, None]
        content = content * tl.exp(last) + tl.dot(tl.trans(key), learning, input_precision=precision)
    tl.store(at, content, is_in)


def step(rates: Tensor, convolved: Tensor, sizes: DeltaSizes, memory: Tensor, states: Tensor) -> Tensor:
    """Run one token of each row, and let the memories of the rows' states go on.

    Args:
        rates: of a token, [B, any columns].
        convolved: queries, keys and values, fp32 [B, channels].
        sizes: of the layer.
        memory: of its states, fp32 [states, H, K, V].
        states: int64 [B].

    Returns:
        fp32 [B, H * V].
    """
    return _by_tokens(_step, rates, convolved, sizes, memory, states)


def run_drafts(rates: Tensor, convolved: Tensor, sizes: DeltaSizes, memory: Tensor, packed: PackedStates) -> Tensor:
    """Run packed rows of few tokens as steps do; the memories go on by the tokens before the rows' stops; see scan."""
    states, ends, _, _, lasts, stops = packed
    return _by_tokens(_run_drafts, rates, convolved, sizes, memory, states, ends, lasts, stops)


def _by_tokens(
    kernel: Any, rates: Tensor, convolved: Tensor, sizes: DeltaSizes, memory: Tensor, states: Tensor, *rows: Tensor
) -> Tensor:
    (key_heads, heads, key_size, value_size), vectors = sizes[:4], sizes[4:]
    block = min(triton.next_power_of_2(value_size), _COLUMNS)
    out = torch.empty(len(rates), heads * value_size, device=rates.device)
    kernel[(len(states), heads, triton.cdiv(value_size, block))](
        rates, convolved, memory, states, *rows, *vectors, out, rates.stride(0), key_size**-0.5, key_heads, heads,
        key_size=key_size, value_size=value_size, block=block, width=triton.next_power_of_2(key_size), num_warps=4,
    )  # fmt: skip
    return out


def scan(
    rates: Tensor,
    convolved: Tensor,
    sizes: DeltaSizes,
    memory: Tensor,
    packed: PackedStates,
    rows: PackedRows,
    is_exact: bool,
) -> Tensor:
    """Run packed rows, and let the memories of the rows' states go on.

    Args:
        rates: see step; of T tokens.
        convolved: likewise.
        sizes: of the layer.
        memory: of its states.
        packed: the rows.
        rows: the same, to be cut into chunks.
        is_exact: whether products are of fp32 numbers.

    Returns:
        fp32 [T, H * V].
    """
    (key_heads, heads, key_size, value_size), vectors = sizes[:4], sizes[4:]
    chunk, most, warps, precision = EXACT if is_exact else OLDER if is_older(rates.device) else _NEWER
    states, ends, positions, of_tokens, *_ = packed
    out, (blocks, _) = torch.empty(len(rates), heads * value_size, device=rates.device), rows.cut(chunk)
    solved, scores = torch.empty(2, len(rates), heads, chunk, device=rates.device)
    kind = {"key_size": key_size, "value_size": value_size, "chunk": chunk, "precision": precision}
    numbers = rates.stride(0), key_size**-0.5, key_heads, heads
    width, block = max(16, triton.next_power_of_2(key_size)), min(max(16, triton.next_power_of_2(value_size)), most)
    _solve[(len(blocks), heads)](
        rates, convolved, states, blocks, of_tokens, *vectors, solved, scores, *numbers, **kind, width=width,
        num_warps=warps,
    )  # fmt: skip
    _scan[(len(states), heads, triton.cdiv(value_size, block))](
        rates, convolved, memory, states, ends, positions, *vectors, solved, scores, out, *numbers, **kind,
        block=block, width=width, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return out
