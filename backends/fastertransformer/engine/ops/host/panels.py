"""A matrix in the layout that products.c multiplies."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from ...large_pages import SharedPages
from .compiled import HostKernels, host_kernels

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)  # in products.c's order
_ACTIVATIONS = ("", "relu", "silu", "gelu")  # likewise
_PAGES = SharedPages()
_Normed = tuple[Tensor, Tensor | None, float, bool]  # weight, bias, epsilon, whether it is an RMS norm


class _Matrix(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("numbers", "scales", "bias")),
        *((name, ctypes.c_long) for name in ("inputs", "outputs", "type")),
    ]


class Panels:
    """A matrix that lies in panels, and a bias.

    Args:
        kernels: that multiply it.
        weight: [out, in], on the CPU, of one of the types that the kernels know.
        bias: [out] or None.
        scales: what each output is multiplied by, [out]; None: nothing is.

    Attributes:
        outputs, inputs: of the weight.
        at: address of what the kernels read of it.
        rounds: whether inputs are rounded to bf16: the processor multiplies pairs of them, and so they lie.
        group: inputs whose numbers of an output lie beside one another, because the processor multiplies them at once.
    """

    def __init__(
        self, kernels: HostKernels, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
    ) -> None:
        self._kernels, (self.outputs, self.inputs), self._width = kernels, weight.shape, kernels.width
        self.rounds = kernels.multiplies_pairs and weight.dtype == torch.bfloat16
        if self.rounds and self.inputs % 2:
            weight, self.rounds = weight.float(), False
        self.group = 4 if kernels.multiplies_quads and weight.dtype == torch.int8 else 1 + self.rounds
        self._padded = -(-self.outputs // self._width) * self._width
        self._groups = -(-self.inputs // self.group)
        numbers = self._padded * self._groups * self.group
        self._numbers = _PAGES.take(numbers * weight.itemsize).view(weight.dtype)
        self._write(weight)
        # The kernels read these where they are, so that they live as long as this.
        self._kept = [None if each is None else self._filled_up(each) for each in (scales, bias)]
        pointers = [None if each is None else each.data_ptr() for each in self._kept]
        known = _TYPES.index(weight.dtype)
        self._matrix = _Matrix(self._numbers.data_ptr(), *pointers, self.inputs, self.outputs, known)
        self.at = ctypes.addressof(self._matrix)

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None) -> Panels | None:
        """Lay a matrix out, if it is on a CPU that has kernels for its type."""
        if weight.device.type != "cpu" or not weight.numel() or not can_keep(weight.dtype):
            return None
        kernels = host_kernels()
        return cls(kernels, weight, bias, scales) if kernels else None

    @property
    def matrix(self) -> Tensor:
        """The numbers as a matrix, [out, in], that has the weight's shape and type and not its order."""
        return self._numbers[: self.outputs * self.inputs].view(self.outputs, self.inputs)

    def dense(self) -> Tensor:
        """Return a copy of the matrix in the weight's order."""
        return self._panels().transpose(1, 2).reshape(self._padded, -1)[: self.outputs, : self.inputs]

    def is_like(self, other: Panels) -> bool:
        """Return whether another matrix has this one's shape and type, so that both can be multiplied at once."""
        return self.matrix.shape == other.matrix.shape and self.matrix.dtype == other.matrix.dtype

    def _panels(self) -> Tensor:
        """View the numbers as [panels, inputs / group, width, group]."""
        return self._numbers.view(self._padded // self._width, self._groups, self._width, self.group)

    def _write(self, weight: Tensor) -> None:
        """Copy a weight, whatever its strides; the last panel, and the last group, are filled up with zeros."""
        panels, whole = self._panels(), self.outputs // self._width
        if missing := self._groups * self.group - self.inputs:
            weight = F.pad(weight, (0, missing))
        full, rest = weight[: whole * self._width], weight[whole * self._width :]
        panels[whole:] = 0
        for some, rows, width in ((panels[:whole], full, self._width), (panels[whole:], rest, len(rest))):
            if len(rows):
                some[:, :, :width] = rows.view(len(some), width, self._groups, self.group).transpose(1, 2)

    def _filled_up(self, values: Tensor) -> Tensor:
        filled = torch.zeros(self._padded)
        filled[: self.outputs] = values
        return filled

    def multiply(
        self,
        x: Tensor,
        norm: _Normed | None = None,
        activation: str = "",
        gate: Panels | None = None,
        out: Tensor | None = None,
        adds: bool = False,
    ) -> Tensor:
        """Compute activation(norm(x) @ weight.T * scales + bias) * (the same of a gate), fp32 [..., in] -> [..., out].

        Args:
            x: fp32.
            norm: fp32 weight and bias, and what else a norm has; None: x is as it is.
            activation: one that the kernels know.
            gate: a matrix of the same shape and type; None: there is none.
            out: fp32 [..., out], contiguous, that is written to; None: a new tensor is.
            adds: whether to add to ``out``.
        """
        rows = x.numel() // self.inputs
        x = x.contiguous()
        if out is None:
            out = x.new_empty(*x.shape[:-1], self.outputs)
        weight, bias, eps, is_rms = norm or (None, None, 0.0, False)
        failed = self._kernels.multiply(
            self._kernels.run,
            torch.get_num_threads(),
            self.at,
            gate.at if gate else None,
            x.data_ptr(),
            rows,
            None if weight is None else weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            eps,
            is_rms,
            activation_number(activation),
            out.data_ptr(),
            adds,
        )
        if failed:
            raise MemoryError(f"there is no memory for {rows} rows of {self.inputs} numbers")
        return out


def can_keep(dtype: torch.dtype) -> bool:
    """Return whether matrices of a type can lie in panels here."""
    if dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16"):
        return False  # oneDNN multiplies many rows by tiles
    return dtype in _TYPES and host_kernels() is not None


def knows(activation: str) -> bool:
    """Return whether the kernels have an activation."""
    return activation in _ACTIVATIONS


def activation_number(activation: str) -> int:
    """Return the kernels' number of an activation that they have."""
    return _ACTIVATIONS.index(activation)
