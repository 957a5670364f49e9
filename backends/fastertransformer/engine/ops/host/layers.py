"""A decode step's layers in one call, by layers.c."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..linear import Norm
from ..positions import AttentionSpec
from .attention import DecodeAttention
from .compiled import HostKernels
from .panels import Panels, activation_number


class PlainLayer(NamedTuple):
    """Attention and a feed-forward, each normed before and added to the residual stream."""

    before: Norm
    qkv: Panels
    out: Panels
    between: Norm
    into: Panels
    gate: Panels | None
    down: Panels


class _Norm(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("eps", ctypes.c_double),
        ("rms", ctypes.c_long),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "into", "gate", "down")),
        *((name, _Norm) for name in ("before", "between")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
    ]


class HostLayers:
    """Layers of one shape.

    Args:
        kernels: compiled.
        layers: in their order.
        spec: of their attention.
        size_per_head: width of a head.
        activation: one that the kernels know.
    """

    def __init__(
        self,
        kernels: HostKernels,
        layers: Sequence[PlainLayer],
        spec: AttentionSpec,
        size_per_head: int,
        activation: str,
    ) -> None:
        self._kernels, self._spec, self._size = kernels, spec, size_per_head
        self._kept = tuple(layers)  # the kernels read them in place
        self._activation = activation_number(activation)
        first = layers[0]
        self._heads = first.out.inputs // size_per_head
        self._kv_heads = (first.qkv.outputs // size_per_head - self._heads) // 2
        self._numbers = first.qkv.outputs + first.out.inputs + max(layer.down.inputs for layer in layers)
        self._layers = (_Layer * len(layers))(*map(_written, layers))

    def can_run(self, caches: Sequence[Tensor]) -> bool:
        """Return whether the layers' caches are of a kind that the kernel reads: fp32, with keys and values."""
        return all(kv.dtype == torch.float32 and len(kv) == 2 for kv in caches)

    def run(self, x: Tensor, positions: Tensor, tables: Tensor, windows: Tensor, caches: Sequence[Tensor]) -> Tensor:
        """Run the layers on x, fp32 [B, 1, hidden], which may be overwritten; see DecodeAttention for the others."""
        attention = DecodeAttention(self._kernels, positions, tables, windows, self._spec, x)
        for layer, kv in zip(self._layers, caches, strict=True):
            layer.keys = at = kv.data_ptr()
            layer.values = at + kv.stride(0) * kv.itemsize
        x = x.contiguous()
        scratch = x.new_empty(len(x) * self._numbers)
        failed = self._kernels.run_layers(
            self._kernels.run,
            torch.get_num_threads(),
            attention.threads(self._heads * self._size),
            attention.at,
            self._layers,
            len(self._layers),
            x.data_ptr(),
            len(x),
            self._heads,
            self._kv_heads,
            self._size,
            self._activation,
            scratch.data_ptr(),
        )
        if failed:
            raise MemoryError(f"there is no memory for a step of {len(x)} rows")
        return x


def _written(layer: PlainLayer) -> _Layer:
    gate = layer.gate.at if layer.gate else None
    matrices = layer.qkv.at, layer.out.at, layer.into.at, gate, layer.down.at
    return _Layer(*matrices, *(_written_norm(norm) for norm in (layer.before, layer.between)))


def _written_norm(norm: Norm) -> _Norm:
    return _Norm(norm.weight.data_ptr(), None if norm.bias is None else norm.bias.data_ptr(), norm.eps, norm.is_rms)
