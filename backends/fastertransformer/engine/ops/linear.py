"""The weights of a product, x @ weight.T + bias, in the form that a device multiplies fastest, or that is smallest.

On an x86-64 CPU with a C compiler the weight lies in panels that our own kernels multiply (host/products.c). Elsewhere
it is packed once into oneDNN's blocked layout, as TorchInductor does when it freezes a model (the same two operators);
two and three rows are then padded to four. docs/performance.md has what both take. One row's products take as long as
to read the matrices, 25 to 29 GB/s of one core (AMD EPYC, Zen 4).

int8: each output channel has a scale, its largest weight / 127, and its weights are rounded to multiples of it. Without
the kernels that saves memory on a CPU, not time: torch's own int8 product is 3 to 30 times slower there in fp32 than to
convert and multiply (768 x 3072, 1 to 256 rows).

What comes before and after a product (norm, activation, residual) is ops.ops.Ops.linear's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ft_format.weight_format import INT8, NONE, WeightFormat

from .host.panels import Panels
from .low_rank import Adaptable

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of a product's result, which may be overwritten
    "": lambda x: x,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "exact_gelu": F.gelu,
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": lambda x: F.silu(x, inplace=True),
}
LEAST_ROWS = 4  # of a product of packed weights with more than one


@dataclass(frozen=True)
class Norm:
    """A layer norm, or an RMS norm, along the last axis.

    Attributes:
        weight: [width], of the type that is computed in, or fp32.
        bias: [width], of the weight's type, or None.
        eps: added to the variance.
        is_rms: whether it is an RMS norm: no mean is subtracted.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_rms: bool = False


class HeadNorms(NamedTuple):
    """Norms of each head's query and key, [D] each, before they are rotated."""

    query: Norm
    key: Norm


class Blocks(NamedTuple):
    """Which columns of a matrix share a scale.

    Attributes:
        width: how many.
        first: of the columns in the first of these blocks; a rank's part may begin within one.
    """

    width: int
    first: int


class Linear(Adaptable):
    """A matrix and a bias on their device.

    Args:
        weight: [out, in].
        bias: [out] or None.
        is_lent: whether the caller reuses the weight's memory, so that it must be copied.

    Attributes:
        weight: [out, in], packed on a CPU: its numbers are then in another order.
        panels: the same in our kernels' layout; None: torch multiplies it.
        has_kernels: whether our kernels and cuBLAS multiply it; else it does so itself.
        scales: what a weight of 8 bits is multiplied by, [out], or [out, blocks]; None: the weight has more bits.
        blocks: of columns that have one scale each; None: all columns have one.
        rounds: whether it is multiplied with activations of 8 bits, where a GPU has many rows of them.
        scales_by_block: the scales as products of such activations read them, [blocks, out]; None: as they are.
        size_bytes: of weight and bias.
        folded: what kernels have computed once of this weight and a norm, by the norm's weight; see gemm.fold.
        input_gate: activation of the first half of what it multiplies, times the second half, where these come side by
            side; None: they never do. See ops.Ops.gated_linear.
    """

    has_kernels = True
    panels: Panels | None = None
    scales: Tensor | None = None
    blocks: Blocks | None = None
    rounds = False
    scales_by_block: Tensor | None = None
    joined: Linear | None = None
    input_gate: str | None = None
    with_adapters: Linear | None = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, is_lent: bool = False) -> None:
        self.bias, self.folded = bias, dict[Tensor, Any]()
        self._zeros: Tensor | None = None
        self.panels = Panels.of(weight, bias)
        self._is_packed = not self.panels and weight.device.type == "cpu" and _can_pack(weight)
        self.weight: Tensor
        if self.panels:
            self.weight = self.panels.matrix
        elif self._is_packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        else:
            self.weight = weight.clone(memory_format=torch.contiguous_format) if is_lent else weight.contiguous()
        self.size_bytes = sum(each.numel() * each.dtype.itemsize for each in (weight, bias) if each is not None)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Return what is multiplied, [out, in], in a type; of one that is not packed."""
        return self.weight

    def join(self, other: Linear) -> None:
        """Lay the weight of another product with the same input beside this one, on a GPU: one product is faster there.

        On an H200 two of 3072 x 1024 take 12 us for 24 to 256 rows and both at once 7 to 8; of 14336 x 4096, 195 and
        171 us for 512 rows.
        """
        if self.weight.is_cuda and type(self) is type(other) is Linear and self.bias is other.bias is None:
            whole, outputs = Linear(torch.cat((self.weight, other.weight))), len(self.weight)
            self.joined, other.joined, other.joined_at = whole, whole, outputs
            self.weight, other.weight = whole.weight[:outputs], whole.weight[outputs:]

    def extended(self, rows: int) -> Linear | None:
        """Return this matrix with further rows behind it, zeros, of which it is a view from now on.

        None: its numbers are not those that are computed with, or lie in another order, as a CPU's do.
        """
        if type(self) is not Linear or self.panels or self._is_packed:
            return None
        outputs, bias = len(self.weight), None if self.bias is None else F.pad(self.bias, (0, rows))
        whole = Linear(F.pad(self.weight, (0, 0, 0, rows)), bias)
        self.weight = whole.weight[:outputs]
        return whole

    def bias_or_zeros(self, x: Tensor) -> Tensor:
        """Return the bias, or zeros of x's type, for operations that must have one."""
        if self.bias is not None:
            return self.bias
        if self._zeros is None:
            self._zeros = x.new_zeros(len(self.weight))
        return self._zeros

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], same type."""
        if self.panels:
            return self.panels.multiply(x.float()).to(x.dtype)
        if not self._is_packed:
            return F.linear(x, self.weight, self.bias)
        rows = x.numel() // x.shape[-1]
        if not (padding := padded_rows(rows) - rows):
            return _multiplied(x, self.weight, self.bias)
        y = _multiplied(F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, padding)), self.weight, self.bias)
        return y[:rows].view(*x.shape[:-1], y.shape[-1])


class Int8Linear(Linear):
    """A matrix quantized to int8 with a scale for each output channel, and a bias; the weight given is not kept."""

    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None, is_lent: bool = False) -> None:
        self.bias, self.folded, self._zeros = bias, {}, None
        self.weight, self.scales = quantize(weight)
        kept = (self.weight, self.scales, bias)
        self.size_bytes = sum(each.numel() * each.dtype.itemsize for each in kept if each is not None)
        if panels := Panels.of(self.weight, bias, self.scales):
            self.panels, self.weight = panels, panels.matrix

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """See Linear."""
        return self.weight * self.scales[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], same type."""
        if self.panels:
            return self.panels.multiply(x.float()).to(x.dtype)
        y = F.linear(x, self.weight.to(x.dtype)) * self.scales
        return y if self.bias is None else y + self.bias


PACKED: dict[WeightFormat, type[Linear]] = {NONE: Linear, INT8: Int8Linear}
"""What keeps and multiplies a matrix of each format."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix by output channel: int8 [out, in], contiguous, and scales [out]."""
    if weight.is_meta:  # there are no numbers, and torch would take a second to prepare for them
        return torch.empty(weight.shape, dtype=torch.int8, device=weight.device), weight[:, 0]
    scales = weight.abs().amax(dim=1).float().clamp_(min=1e-12).div_(127)
    rounded = weight.to(torch.float32, copy=True).div_(scales[:, None]).round_().to(torch.int8)
    return rounded.contiguous(), scales.to(weight.dtype)


def padded_rows(rows: int) -> int:
    """Return the rows that a product of packed weights is made with: 1, 4 to 16, then 8 sizes for each doubling.

    oneDNN compiles code for every number of rows and form of the weight, about 0.4 MB each, and keeps 1024 of them. The
    number of rows is another at nearly every step, and that was hundreds of MB; so there are 78 sizes up to 4096 rows.
    """
    if rows < 2:
        return rows
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return max(LEAST_ROWS, -(-rows // step) * step)


def _multiplied(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def _can_pack(weight: Tensor) -> bool:
    """Try: the operators are internal to torch and depend on its build and on the processor."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight[:1].clone())
        _multiplied(weight[:1], packed, None)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True
