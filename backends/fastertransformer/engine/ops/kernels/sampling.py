"""Sampling: each row's argmax, or a random token of its top-k, its nucleus or all tokens, without sorting.

To draw from a top-k or a nucleus, a program reads a row some thirty times, mostly from the L2 cache: the smallest logit
that is kept is found two bits at a time, as in a radix select, once by counting (top-k), once by adding up
probabilities (top-p). For the argmax, and to draw from all tokens, several programs share a row's columns, and the last
to finish compares their results; of all tokens it then looks through the part that has the drawn one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..logits import LEAST_ALLOWED, NOT_FINITE, DrawLimits
from .launch import scratch_of, uses_pdl

_BLOCK, _WARPS = 4096, 16  # of drawing
_SLOTS = 32  # of a program that gives the limits of draws
_PARTS = 32  # programs that share a row
_MASKED_COLUMNS = 2048  # of a program that masks
_LEAST_KEY = tl.constexpr(-2147483648)


@triton.jit
def _keys(values):
    """int32 in the order of fp32 numbers: the largest number has the largest key; no number has the least key."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weights(row_logits, first, columns, scale, most, block: tl.constexpr):
    """Return the keys of the columns from ``first`` on, the least key beyond the last one, and exp(value - most)."""
    at = first + tl.arange(0, block)
    values = tl.load(row_logits + at, at < columns, -float("inf")) * scale
    return tl.where(at < columns, _keys(values), _LEAST_KEY), tl.exp(values - most)


@triton.jit
def _least(row_logits, columns, scale, most, wanted, counts: tl.constexpr, block: tl.constexpr):
    """Find the largest key such that the numbers at or above it are at least ``wanted`` (counts), or weigh as much."""
    found = tl.full((), _LEAST_KEY, tl.int64)
    for step in range(16):
        unit = tl.full((), 1, tl.int64) << (30 - 2 * step)
        one = tl.zeros((block,), tl.float32)
        two = tl.zeros((block,), tl.float32)
        three = tl.zeros((block,), tl.float32)
        for first in range(0, columns, block):
            keys, weights = _weights(row_logits, first, columns, scale, most, block)
            if counts:
                weights = tl.full((block,), 1.0, tl.float32)
            one += tl.where(keys >= (found + unit).to(tl.int32), weights, 0.0)
            two += tl.where(keys >= (found + 2 * unit).to(tl.int32), weights, 0.0)
            three += tl.where(keys >= (found + 3 * unit).to(tl.int32), weights, 0.0)
        has_one, has_two, has_three = tl.sum(one) >= wanted, tl.sum(two) >= wanted, tl.sum(three) >= wanted
        found += unit * (has_one.to(tl.int64) + has_two.to(tl.int64) + has_three.to(tl.int64))
    return found.to(tl.int32)


@triton.jit
def _above(row_logits, columns, scale, most, least, block: tl.constexpr):
    """Return the count and the weight of the numbers above a key, and the weight of one number that has the key."""
    count = tl.zeros((block,), tl.float32)
    weight = tl.zeros((block,), tl.float32)
    own = tl.zeros((block,), tl.float32)
    for first in range(0, columns, block):
        keys, weights = _weights(row_logits, first, columns, scale, most, block)
        count += tl.where(keys > least, 1.0, 0.0)
        weight += tl.where(keys > least, weights, 0.0)
        own = tl.maximum(own, tl.where(keys == least, weights, 0.0))
    return tl.sum(count), tl.sum(weight), tl.max(own)


@triton.jit
def _keeps_all(top_k, top_p, columns):
    return ((top_k <= 0) | (top_k >= columns)) & (top_p >= 1)


@triton.jit(do_not_specialize=("columns",))
def _draw_of_all(
    logits, rows, top_k, top_p, scales, uniform, tokens, partial, finished, columns,
    parts: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Draw a token of all of a row: add up its parts' weights, find the drawn part, and add up that one's columns."""
    program, part = tl.program_id(0), tl.program_id(1)
    if not _keeps_all(tl.load(top_k + program), tl.load(top_p + program), columns):
        return
    row_logits, scale = logits + tl.load(rows + program) * columns, 1.0
    if scales is not None:
        scale = tl.load(scales + program)
    share = tl.cdiv(tl.cdiv(columns, parts), block) * block
    most = tl.full((block,), -1e30, tl.float32)  # of each lane
    sums = tl.zeros((block,), tl.float32)
    for first in range(part * share, tl.minimum((part + 1) * share, columns), block):
        at = first + tl.arange(0, block)
        values = tl.load(row_logits + at, at < columns, -float("inf")) * scale
        higher = tl.maximum(most, values)
        sums = sums * tl.exp(most - higher) + tl.exp(values - higher)
        most = higher
    highest = tl.max(most, 0)
    row_partial = partial + program * parts * 2
    tl.store(row_partial + part, highest)
    tl.store(row_partial + parts + part, tl.sum(sums * tl.exp(most - highest), 0))
    tl.debug_barrier()
    if tl.atomic_add(finished + program, 1, sem="acq_rel", scope="gpu") != parts - 1:
        return
    every_part = tl.arange(0, parts)
    peaks = tl.load(row_partial + every_part, cache_modifier=".cg")
    peak = tl.max(peaks, 0)
    weights = tl.load(row_partial + parts + every_part, cache_modifier=".cg") * tl.exp(peaks - peak)
    sums_after = tl.cumsum(weights)
    target = tl.load(uniform + program).to(tl.float32) * tl.sum(weights, 0)
    # The first part whose sum exceeds the target; where rounding leaves none, the last that has any weight.
    chosen = tl.min(tl.where((weights > 0) & (sums_after > target), every_part, parts), 0)
    chosen = tl.minimum(chosen, tl.max(tl.where(weights > 0, every_part, 0), 0))
    before = tl.sum(tl.where(every_part < chosen, weights, 0.0), 0)
    found, last = columns, chosen * share
    for first in range(chosen * share, tl.minimum((chosen + 1) * share, columns), block):
        at = first + tl.arange(0, block)
        weight = tl.exp(tl.load(row_logits + at, at < columns, -float("inf")) * scale - peak)
        is_drawn = (weight > 0) & (before + tl.cumsum(weight) > target)
        found = tl.minimum(found, tl.min(tl.where(is_drawn, at, columns), 0))
        last = tl.maximum(last, tl.max(tl.where(weight > 0, at, 0), 0))
        before += tl.sum(weight, 0)
    tl.store(tokens + program, tl.minimum(found, last).to(tl.int64))
    tl.store(finished + program, 0)


@triton.jit(do_not_specialize=("columns",))
def _draw(logits, rows, top_k, top_p, scales, uniform, tokens, columns, block: tl.constexpr):
    program = tl.program_id(0)
    row_logits = logits + tl.load(rows + program) * columns
    k, p = tl.load(top_k + program).to(tl.float32), tl.load(top_p + program)
    if _keeps_all(k, p, columns):
        return
    scale = 1.0
    if scales is not None:
        scale = tl.load(scales + program)
    highest = tl.full((block,), -float("inf"), tl.float32)
    for first in range(0, columns, block):
        at = first + tl.arange(0, block)
        highest = tl.maximum(highest, tl.load(row_logits + at, at < columns, -float("inf")) * scale)
    most = tl.max(highest)
    # All above ``least`` are kept, and of the ties with it the first ones, up to the weight ``rest``.
    least = tl.full((), _LEAST_KEY, tl.int32)
    above, whole, own = _above(row_logits, columns, scale, most, least, block)
    rest = whole * 0
    if (k > 0) & (k < columns):
        least = _least(row_logits, columns, scale, most, k, True, block)
        above, whole, own = _above(row_logits, columns, scale, most, least, block)
        rest = (k - above) * own
    if p < 1:
        wanted = tl.maximum(p * (whole + rest), 1e-37)
        least = _least(row_logits, columns, scale, most, wanted, False, block)
        above, whole, own = _above(row_logits, columns, scale, most, least, block)
        rest = wanted - whole
    target = tl.load(uniform + program).to(tl.float32) * (whole + rest)
    sum_before = whole * 0
    ties_before = whole * 0
    chosen, last = columns, 0
    for first in range(0, columns, block):
        keys, weights = _weights(row_logits, first, columns, scale, most, block)
        is_tie = keys == least
        ties = ties_before + tl.cumsum(is_tie.to(tl.float32))
        share = tl.minimum(weights, tl.maximum(rest - (ties - 1) * own, 0.0))
        share = tl.where(keys > least, weights, tl.where(is_tie, share, 0.0))
        sums = sum_before + tl.cumsum(share)
        at = first + tl.arange(0, block)
        chosen = tl.minimum(chosen, tl.min(tl.where((share > 0) & (sums > target), at, columns)))
        last = tl.maximum(last, tl.max(tl.where(share > 0, at, 0)))
        sum_before += tl.sum(share)
        ties_before += tl.sum(is_tie.to(tl.float32))
    tl.store(tokens + program, tl.minimum(chosen, last).to(tl.int64))


@triton.jit
def _mix(bits):
    """Mix a uint64 as sampling.draw_uniform does."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


_COLUMNS = ("seeds", "generated", "top_ks", "top_ps", "temperatures")


@triton.jit(
    do_not_specialize=("count", "integers_stride", "floats_stride"),
    do_not_specialize_on_alignment=_COLUMNS,  # each begins anywhere in the table
)
def _draw_limits(
    slots, seeds, generated, top_ks, top_ps, temperatures, top_k, top_p, uniform, scales,
    count, integers_stride, floats_stride, block: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * block + tl.arange(0, block)
    is_row = at < count
    slot = tl.load(slots + at, is_row, 0)
    integers, floats = slot * integers_stride, slot * floats_stride
    step = (tl.load(generated + integers, is_row, 0) + 1).to(tl.uint64)
    bits = _mix(_mix(tl.load(seeds + integers, is_row, 0).to(tl.uint64)) + step * 0x9E3779B97F4A7C15)
    tl.store(uniform + at, (bits >> 11).to(tl.float64) * 1.1102230246251565e-16, is_row)  # 2**-53
    tl.store(top_k + at, tl.load(top_ks + integers, is_row, 0), is_row)
    tl.store(top_p + at, tl.load(top_ps + floats, is_row, 0.0), is_row)
    if temperatures is not None:
        temperature = tl.load(temperatures + floats, is_row, 1.0)
        scale = tl.div_rn(tl.full((block,), 1.0, tl.float32), temperature + 1e-6)
        tl.store(scales + at, tl.where(temperature == 1, 1.0, scale), is_row)


def draw_limits(
    slots: Tensor, seeds: Tensor, generated: Tensor, top_k: Tensor, top_p: Tensor, temperature: Tensor | None = None
) -> DrawLimits:
    """Return what limits the next draw of some slots, as Ops.draw_limits says, in one launch."""
    count, uniform = len(slots), torch.empty(len(slots), dtype=torch.float64, device=slots.device)
    own_top_k, own_top_p = torch.empty_like(slots), torch.empty_like(uniform, dtype=torch.float32)
    scales = None if temperature is None else torch.empty_like(own_top_p)
    _draw_limits[(triton.cdiv(count, _SLOTS),)](
        slots, seeds, generated, top_k, top_p, temperature, own_top_k, own_top_p, uniform, scales,
        count, top_k.stride(0), top_p.stride(0), block=_SLOTS, num_warps=1,
    )  # fmt: skip
    return DrawLimits(own_top_k, own_top_p, uniform, scales)


def draw_tokens(logits: Tensor, rows: Tensor, limits: DrawLimits) -> Tensor:
    """Draw a token for some rows, as Ops.draw_tokens says; rows that keep all tokens have a kernel of their own."""
    top_k, top_p, uniform, scales = limits[:4]
    logits, tokens, columns = logits.contiguous(), torch.empty_like(rows), logits.shape[1]
    partial, finished = scratch_of(logits.device).get(len(rows), len(rows) * _PARTS * 2)
    _draw_of_all[(len(rows), _PARTS)](
        logits, rows, top_k, top_p, scales, uniform, tokens, partial, finished, columns,
        parts=_PARTS, block=1024, num_warps=4,
    )  # fmt: skip
    if limits.keeps_all:
        return tokens
    block = min(_BLOCK, max(32, triton.next_power_of_2(columns)))
    _draw[(len(rows),)](
        logits, rows, top_k, top_p, scales, uniform, tokens, columns, block=block, num_warps=min(_WARPS, block // 32)
    )
    return tokens


@triton.jit(do_not_specialize=("columns", "mask_bytes"))
def _keep_allowed(logits, rows, bits, columns, mask_bytes, least, block: tl.constexpr):
    program, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    row = program
    if rows is not None:
        row = tl.load(rows + program)
    held = tl.load(bits + program * mask_bytes + (at >> 3), at < columns, 0).to(tl.int32)
    values = tl.load(logits + row * columns + at, at < columns, 0.0)
    kept = tl.where((held >> (at & 7)) & 1 == 1, tl.maximum(values, least), -float("inf"))
    tl.store(logits + row * columns + at, kept, at < columns)


def keep_allowed(logits: Tensor, rows: Tensor | None, bits: Tensor) -> Tensor:
    """Overwrite logits as Ops.keep_allowed says, in one launch."""
    logits, columns = logits.contiguous(), logits.shape[1]
    grid = len(bits), triton.cdiv(columns, _MASKED_COLUMNS)
    _keep_allowed[grid](
        logits, rows, bits, columns, bits.shape[1], LEAST_ALLOWED, block=_MASKED_COLUMNS, num_warps=4
    )  # fmt: skip
    return logits


def warm_up(columns: int, device: torch.device) -> None:
    """Compile the kernels for logits of this many columns."""
    row, logits = torch.zeros(1, dtype=torch.long, device=device), torch.zeros(1, columns, device=device)
    for temperature in (None, row.float()):
        limits = draw_limits(row, row, row, row, row.float(), temperature)
        draw_tokens(logits, row, limits)
    bits = torch.zeros(1, columns // 8 + 1, dtype=torch.uint8, device=device)
    for rows in (None, row):
        keep_allowed(logits, rows, bits)


@triton.jit(do_not_specialize=("columns",))
def _argmax_step(
    logits, ids, positions, tokens, partial, finished, columns, lost,
    parts: tl.constexpr, block: tl.constexpr, uses_pdl: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if uses_pdl:
        gdc_launch_dependents()
        gdc_wait()
    share = tl.cdiv(tl.cdiv(columns, parts), block) * block
    most, best = -float("inf"), columns
    for first in range(part * share, tl.minimum((part + 1) * share, columns), block):
        column = first + tl.arange(0, block)
        values = tl.load(logits + row * columns + column, column < columns, -float("inf"))
        highest = tl.max(values, 0)
        place = tl.min(tl.where(values == highest, column, columns), 0)
        best = tl.where(highest > most, place, best)
        most = tl.maximum(most, highest)
    row_partial = partial + row * parts * 2
    tl.store(row_partial + part, most)
    tl.store(row_partial + parts + part, best.to(tl.float32, bitcast=True))
    tl.debug_barrier()
    if tl.atomic_add(finished + row, 1, sem="acq_rel", scope="gpu") != parts - 1:
        return
    every_part = tl.arange(0, parts)
    values = tl.load(row_partial + every_part, cache_modifier=".cg")
    places = tl.load(row_partial + parts + every_part, cache_modifier=".cg").to(tl.int32, bitcast=True)
    best = tl.min(tl.where(values == tl.max(values, 0), places, columns), 0)
    best = tl.minimum(best, columns - 1)  # of NaN, which is lost
    first_value = tl.load(logits + row * columns)
    is_finite = tl.abs(first_value) < float("inf")
    tl.store(tokens + row, tl.where(is_finite, best, lost).to(tl.int64))
    tl.store(ids + row, best.to(tl.int64))
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(finished + row, 0)


def argmax_step(logits: Tensor, ids: Tensor, positions: Tensor) -> Tensor:
    """Choose each row's argmax and prepare the next step with it, as Ops.argmax_step says."""
    rows, columns = logits.shape
    partial, finished = scratch_of(logits.device).get(rows, rows * _PARTS * 2)
    tokens = torch.empty_like(ids)
    has_pdl = uses_pdl(logits.device)
    _argmax_step[(rows, _PARTS)](
        logits, ids, positions, tokens, partial, finished, columns, NOT_FINITE,
        parts=_PARTS, block=1024, uses_pdl=has_pdl, num_warps=4, launch_pdl=has_pdl,
    )  # fmt: skip
    return tokens
