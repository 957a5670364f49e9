"""The short convolution of layers that keep states: over a token and the last ones before it, with SiLU behind it.

T: tokens; B: rows; K: tokens that it sees. State 0 belongs to no row and is left as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .elements import activated

_CHANNELS, _TOKENS = 256, 16  # of a program


class PackedStates(NamedTuple):
    """What kernels read of packed rows with states.

    Attributes:
        states: int64 [B].
        ends: int32 [B + 1]: 0, then where each row ends.
        positions: int64 [T]; a row whose first one is 0 begins, with zeros.
        rows: int64 [T], which row each token is of.
        lasts: int32 [B], where the tokens of each row end that are run one by one; a scan runs all.
        stops: int32 [B], where the tokens end by which each row's state goes on; where the row begins: it stays.
    """

    states: Tensor
    ends: Tensor
    positions: Tensor
    rows: Tensor
    lasts: Tensor
    stops: Tensor


class Convolution(NamedTuple):
    """The convolution of a layer.

    Attributes:
        weight: fp32 [channels, K], the token's own number last.
        bias: fp32 [channels]; None: there is none.
        columns: int32 [channels], where each channel's numbers are in a token's input.
    """

    weight: Tensor
    bias: Tensor | None
    columns: Tensor


@triton.jit(do_not_specialize=("states",))
def _convolve_step(
    x, weight, bias, columns, past, states, out, x_stride, channels, taps: tl.constexpr, has_bias: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Compute a row's token, and move its last inputs on; ``taps`` tokens before its own are seen."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    is_in, state = c < channels, tl.load(states + row)
    targets = out + row * channels + c
    if state == 0:
        tl.store(targets, tl.zeros((block,), tl.float32), is_in)
        return
    own = tl.load(x + row * x_stride + tl.load(columns + c, is_in, 0), is_in, 0.0).to(tl.float32)
    weight += c * (taps + 1)
    found = own * tl.load(weight + taps, is_in, 0.0)
    past += state * taps * channels + c
    for tap in tl.static_range(taps):
        seen = tl.load(past + tap * channels, is_in, 0.0)
        found += seen * tl.load(weight + tap, is_in, 0.0)
        if tap > 0:
            tl.store(past + (tap - 1) * channels, seen, is_in)
    if taps > 0:
        tl.store(past + (taps - 1) * channels, own, is_in)
    if has_bias:
        found += tl.load(bias + c, is_in, 0.0)
    tl.store(targets, activated(found, "silu"), is_in)


@triton.jit(do_not_specialize=("states", "positions", "ends", "tokens"))
def _convolve_rows(
    x, weight, bias, columns, past, states, ends, positions, rows, out, x_stride, channels, tokens, taps: tl.constexpr,
    has_bias: tl.constexpr, many: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token, c = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many), tl.program_id(1) * block + tl.arange(0, block)
    is_token, is_channel = token < tokens, c < channels
    row = tl.load(rows + token, is_token, 0)
    first = tl.load(ends + row).to(tl.int64)
    state = tl.load(states + row)
    goes_on = is_token & (state > 0) & (tl.load(positions + first, is_token, 0) > 0)
    column = tl.load(columns + c, is_channel, 0)
    found = tl.zeros((many, block), tl.float32)
    for tap in tl.static_range(taps + 1):
        source = token - taps + tap
        is_own = (source >= first) & is_token
        is_before = (source < first) & goes_on
        own = x + (source * x_stride)[:, None] + column[None, :]
        seen = tl.load(own, is_own[:, None] & is_channel[None, :], 0.0).to(tl.float32)
        before = past + ((state * taps + taps + source - first) * channels)[:, None] + c[None, :]
        seen += tl.load(before, is_before[:, None] & is_channel[None, :], 0.0)
        found += seen * tl.load(weight + c * (taps + 1) + tap, is_channel, 0.0)[None, :]
    if has_bias:
        found += tl.load(bias + c, is_channel, 0.0)[None, :]
    targets = out + (token * channels)[:, None] + c[None, :]
    tl.store(targets, activated(found, "silu"), is_token[:, None] & is_channel[None, :])


@triton.jit(do_not_specialize=("states", "positions", "ends", "stops"))
def _keep_last(
    x, columns, past, states, ends, stops, positions, x_stride, channels, taps: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Keep a row's last inputs before its stop; those before its tokens are read before they are overwritten."""
    row, c = tl.program_id(0), tl.program_id(1) * block + tl.arange(0, block)
    start, end, state = tl.load(ends + row).to(tl.int64), tl.load(stops + row).to(tl.int64), tl.load(states + row)
    if (start == end) | (state == 0):
        return
    is_in, goes_on = c < channels, tl.load(positions + start) > 0
    column = tl.load(columns + c, is_in, 0)
    past += state * taps * channels + c
    for tap in tl.static_range(taps):
        source = end - taps + tap
        own = tl.load(x + source * x_stride + column, is_in & (source >= start), 0.0).to(tl.float32)
        own += tl.load(past + (taps + source - start) * channels, is_in & (source < start) & goes_on, 0.0)
        tl.store(past + tap * channels, own, is_in)


def convolve_step(x: Tensor, layer: Convolution, past: Tensor, states: Tensor) -> Tensor:
    """Convolve one token of each row, [B, any columns] -> fp32 [B, channels]; the past of the rows' states moves on."""
    channels, size = layer.weight.shape
    out = torch.empty(len(x), channels, device=x.device)
    _convolve_step[(len(x), triton.cdiv(channels, _CHANNELS))](
        x, layer.weight, layer.bias, layer.columns, past, states, out, x.stride(0), channels,
        taps=size - 1, has_bias=layer.bias is not None, block=_CHANNELS, num_warps=2,
    )  # fmt: skip
    return out


def convolve_rows(x: Tensor, layer: Convolution, past: Tensor, packed: PackedStates) -> Tensor:
    """Convolve packed rows, [T, any columns] -> fp32 [T, channels]; the past of the rows' states moves on."""
    (channels, size), tokens, (states, ends, positions, rows, _, stops) = layer.weight.shape, len(x), packed
    out, blocks = torch.empty(tokens, channels, device=x.device), triton.cdiv(channels, _CHANNELS)
    _convolve_rows[(triton.cdiv(tokens, _TOKENS), blocks)](
        x, layer.weight, layer.bias, layer.columns, past, states, ends, positions, rows, out, x.stride(0), channels,
        tokens, taps=size - 1, has_bias=layer.bias is not None, many=_TOKENS, block=_CHANNELS, num_warps=8,
    )  # fmt: skip
    _keep_last[(len(states), blocks)](
        x, layer.columns, past, states, ends, stops, positions, x.stride(0), channels,
        taps=size - 1, block=_CHANNELS, num_warps=2,
    )  # fmt: skip
    return out
