"""The gate and the norm behind a layer's recurrence, by group of its output, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..linear import Norm
from .elements import activated

_NUMBERS = 1024  # of a program at least, if there are as many


class Gate(NamedTuple):
    """How the output of a layer is gated, and normed.

    Attributes:
        columns: int32 [width], where the gates are in a token's input.
        groups: that are normed, each by itself.
        norm: with a weight for each number, or for each of a group; None: there is none.
        is_behind: whether the gate is multiplied in behind the norm.
    """

    columns: Tensor
    groups: int
    norm: Norm | None
    is_behind: bool


@triton.jit
def _gate_groups(
    x, given, columns, gain, out, given_stride, groups, size, eps, has_norm: tl.constexpr, is_behind: tl.constexpr,
    is_shared: tl.constexpr, many: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    group, place = tl.program_id(1) * many + tl.arange(0, many), tl.arange(0, width)
    is_in = (group < groups)[:, None] & (place < size)[None, :]
    at = group[:, None] * size + place[None, :]
    y = tl.load(x + token * groups * size + at, is_in, 0.0)
    gate = tl.load(given + token * given_stride + tl.load(columns + at, is_in, 0), is_in, 0.0).to(tl.float32)
    gate = activated(gate, "silu")
    if not is_behind:
        y *= gate
    if has_norm:
        y *= tl.rsqrt(tl.sum(y * y, 1) / size + eps)[:, None]
        y *= tl.load(gain + (place[None, :] if is_shared else at), is_in, 0.0)
    if is_behind:
        y *= gate
    tl.store(out + token * groups * size + at, y.to(out.dtype.element_ty), is_in)


def gate_groups(x: Tensor, given: Tensor, gate: Gate, dtype: torch.dtype) -> Tensor:
    """Gate and norm fp32 [T, width], contiguous, by what is in the layer's input, [T, any columns] -> [T, width]."""
    tokens, size = len(x), x[0].numel() // gate.groups
    out, width = torch.empty(tokens, gate.groups * size, dtype=dtype, device=x.device), triton.next_power_of_2(size)
    many = min(triton.next_power_of_2(gate.groups), max(1, _NUMBERS // width))
    weight = gate.norm.weight if gate.norm else None
    _gate_groups[(tokens, triton.cdiv(gate.groups, many))](
        x, given, gate.columns, weight, out, given.stride(0), gate.groups, size, gate.norm.eps if gate.norm else 0.0,
        has_norm=gate.norm is not None, is_behind=gate.is_behind, is_shared=weight is not None and len(weight) == size,
        many=many, width=width, num_warps=4 if width * many <= 2048 else 8,
    )  # fmt: skip
    return out
