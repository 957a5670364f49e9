"""x @ weight.T + bias, in the form that the device multiplies fastest, or in the form that takes the least memory.

On a CPU the weight is packed once into oneDNN's blocked layout, as TorchInductor does when it freezes a model (the same
two operators). Measured on 2 cores of an AMD EPYC, torch 2.13, fp32, against ``F.linear``: 1.2 to 2.8 times faster for
768 x 3072 and 1.9 to 3.2 times for the 768 x 50257 head at 1 to 64 rows; bf16 1.5 to 2 times. Two and three rows are
padded to four: a step of a GPT-2 of 124M takes 15.9 ms so, and 18.2 without. One row is not: 11.8 ms, 15 with padding.
(Timed by itself, one matrix again and again, one row is the slower of the two: the matrix then comes from a cache.)

int8: each output channel has a scale, its largest weight / 127, and its weights are rounded to multiples of it. On a
CPU that saves memory, not time: torch's own int8 product is 3 to 30 times slower there in fp32 than to widen and
multiply (768 x 3072, 1 to 256 rows).

On a GPU a product with few rows reads its matrix once, in kernels/, with what comes before and behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ..ops.kernels import can_run_on

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
_LEAST_ROWS = 4  # of a product of packed weights with more than one


@dataclass(frozen=True)
class Norm:
    """A layer norm, or an RMS norm, along the last axis.

    Attributes:
        weight: [width].
        bias: [width], or None.
        eps: added to the variance.
        is_rms: whether it is an RMS norm: no mean is subtracted.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    is_rms: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Norm x, [..., width]."""
        if x.is_cuda and (kernels := _find_kernels(x.device)):
            normed: Tensor = kernels.normed(x.reshape(-1, x.shape[-1]).contiguous(), self).view(x.shape)
            return normed
        if self.is_rms:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class Linear:
    """A matrix and a bias on their device.

    Args:
        weight: [out, in].
        bias: [out] or None.
        is_lent: whether the weight's memory will be used for something else.

    Attributes:
        size_bytes: of both.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, is_lent: bool = False) -> None:
        self._bias = bias
        self._scales: Tensor | None = None
        self._folded: dict[Tensor, Any] = {}  # by a norm's weight, see kernels.product.fold
        self._full_bias: Tensor | None = bias  # zeros where there is none, as soon as somebody needs that
        self._is_packed = weight.device.type == "cpu" and _can_pack(weight)
        self._weight: Tensor
        if self._is_packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        else:
            self._weight = weight.clone(memory_format=torch.contiguous_format) if is_lent else weight.contiguous()
        self.size_bytes = sum(each.numel() * each.dtype.itemsize for each in (weight, bias) if each is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], same type."""
        return self.fused(x)

    def fused(
        self, x: Tensor, norm: Norm | None = None, activation: str = "", residual: Tensor | None = None
    ) -> Tensor:
        """Give activation(the product with norm(x)) + residual, which is overwritten with it if there is one.

        Args:
            x: [..., in].
            norm: of x; None: none.
            activation: one of ACTIVATIONS.
            residual: [..., out], contiguous; None: nothing is added.
        """
        if kernels := self._kernels(x):
            return self._by_kernel(kernels, x, norm, activation, residual)
        x = norm(x) if norm else x
        if x.is_cuda and x.dtype != torch.float32:
            return self._by_library(x, activation, residual)
        y = ACTIVATIONS[activation](self._product(x))
        if residual is None:
            return y
        residual += y
        return residual

    def part(self, x: Tensor) -> Tensor:
        """Product that others are added to, [..., in] -> [..., out]: fp32 where that costs nothing, else x's type."""
        if kernels := self._kernels(x):
            return self._by_kernel(kernels, x, None, dtype=torch.float32)
        return self._product(x)

    def _kernels(self, x: Tensor) -> Any:
        """Give the module kernels.product where it is the fastest for x; else None."""
        if not x.is_cuda or x.dtype == torch.float32:
            return None
        kernels = _find_kernels(x.device)
        rows = x.numel() // x.shape[-1]
        return kernels if kernels and kernels.choose(rows, *self._weight.shape, self._weight.dtype) else None

    def _by_kernel(
        self,
        kernels: Any,
        x: Tensor,
        norm: Norm | None,
        activation: str = "",
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        y = residual
        if y is None:
            y = torch.empty(*x.shape[:-1], len(self._weight), dtype=dtype or x.dtype, device=x.device)
        flat, out = x.reshape(-1, x.shape[-1]).contiguous(), y.view(-1, len(self._weight))
        folded = self._fold(kernels, norm) if norm and len(flat) == 1 else None
        added = None if residual is None else out
        kernels.multiply(flat, self._weight, self._bias, self._scales, norm, activation, added, out, folded)
        return y

    def _by_library(self, x: Tensor, activation: str, residual: Tensor | None) -> Tensor:
        """Give what fused does; cuBLASLt computes gelu and relu, or adds the residual, before it rounds."""
        flat, matrix, outputs = x.reshape(-1, x.shape[-1]), self._matrix(), len(self._weight)
        if residual is not None and self._bias is None and not activation:
            rows = residual.view(-1, outputs)
            torch.addmm(rows, flat, matrix.T, out=rows)
            return residual
        if activation in ("gelu", "relu"):
            if self._full_bias is None:
                self._full_bias = torch.zeros(outputs, dtype=x.dtype, device=x.device)
            y = torch._addmm_activation(self._full_bias, flat, matrix.T, use_gelu=activation == "gelu")
        else:
            y = ACTIVATIONS[activation](F.linear(flat, matrix, self._bias))
        y = y.view(*x.shape[:-1], outputs)
        if residual is None:
            return y
        residual += y
        return residual

    def _matrix(self) -> Tensor:
        """The weight as numbers of x's type."""
        return self._weight

    def _fold(self, kernels: Any, norm: Norm) -> Any:
        """Compute once what does not depend on x; the engine's warm-up asks for it first."""
        if norm.weight not in self._folded:
            self._folded[norm.weight] = kernels.fold(self._weight, self._bias, self._scales, norm)
        return self._folded[norm.weight]

    def _product(self, x: Tensor) -> Tensor:
        if not self._is_packed:
            return F.linear(x, self._weight, self._bias)
        rows = x.numel() // x.shape[-1]
        if not (padding := padded_rows(rows) - rows):
            return _multiplied(x, self._weight, self._bias)
        y = _multiplied(F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, padding)), self._weight, self._bias)
        return y[:rows].view(*x.shape[:-1], y.shape[-1])

    def in_fp32(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """Product with norm(x), [..., in] -> fp32 [..., out], summed in fp32 whatever x and the weight are."""
        if kernels := self._kernels(x):
            return self._by_kernel(kernels, x, norm, dtype=torch.float32)
        x = norm(x) if norm else x
        if self._weight.dtype == torch.float32:
            return self._product(x.float())
        flat = torch.mm(x.reshape(-1, x.shape[-1]), self._matrix().T, out_dtype=torch.float32)
        y = flat.view(*x.shape[:-1], -1)
        return y if self._bias is None else y + self._bias


class Int8Linear(Linear):
    """A matrix kept as int8 with a scale for each output channel, and a bias; nothing else of it is kept.

    Args:
        weight: [out, in].
        bias: [out] or None.
        is_lent: whether the weight's memory will be used for something else; it is never kept.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, is_lent: bool = False) -> None:
        self._bias, self._full_bias, self._folded = bias, bias, {}
        self._scales: Tensor
        self._weight, self._scales = _quantised(weight)
        kept = (self._weight, self._scales, bias)
        self.size_bytes = sum(each.numel() * each.dtype.itemsize for each in kept if each is not None)

    def _matrix(self) -> Tensor:
        if kernels := _find_kernels(self._weight.device):
            widened: Tensor = kernels.widen(self._weight, self._scales)
            return widened
        return self._weight * self._scales[:, None]

    def _product(self, x: Tensor) -> Tensor:
        y = F.linear(x, self._weight.to(x.dtype)) * self._scales
        return y if self._bias is None else y + self._bias


def _quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Give int8 [out, in], contiguous, and scales [out]."""
    if weight.is_meta:  # where there are no numbers, and torch would take a second to get ready for them
        return torch.empty(weight.shape, dtype=torch.int8, device=weight.device), weight[:, 0]
    scales = weight.abs().amax(dim=1).float().clamp_(min=1e-12).div_(127)
    rounded = weight.to(torch.float32, copy=True).div_(scales[:, None]).round_().to(torch.int8)
    return rounded.contiguous(), scales.to(weight.dtype)


@lru_cache
def _find_kernels(device: torch.device) -> Any:
    """Import the kernels where they can be compiled: torch for NVIDIA's GPUs brings triton along."""
    if not can_run_on(device):
        return None
    from ..ops.kernels import gemm as product

    return product


def padded_rows(rows: int) -> int:
    """Rows that a product of packed weights is made with: 1, 4 to 16, then 8 sizes for each doubling.

    oneDNN compiles code for every number of rows and form of the weight, about 0.4 MB each, and keeps 1024 of them. The
    number of rows is another at nearly every step, and that was hundreds of MB; so there are 78 sizes up to 4096 rows.
    """
    if rows < 2:
        return rows
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return max(_LEAST_ROWS, -(-rows // step) * step)


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
