"""Rearrangements to FasterTransformer's T5. Each is a view, and right for one training rank's part.

Shapes are torch's, [out, in]; "heads" is the number of heads in the array at hand.
"""

from __future__ import annotations

from collections.abc import Callable

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import T5Dims


def projection(weight: Array, dims: T5Dims) -> Array:
    """Turn a weight [heads * size_per_head, d_model] into [d_model, heads, size_per_head], or split a bias likewise."""
    by_head = weight.reshape(-1, dims.size_per_head, *weight.shape[1:])
    return by_head if weight.ndim == 1 else by_head.transpose(2, 0, 1)


def output(weight: Array, dims: T5Dims) -> Array:
    """Turn [d_model, heads * size_per_head] into [heads, size_per_head, d_model]."""
    return weight.reshape(weight.shape[0], -1, dims.size_per_head).transpose(1, 2, 0)


def fused_part(index: int, count: int, is_legacy: bool = False) -> Callable[[Array, T5Dims], Array]:
    """Take one of Megatron's fused projections (q, k, v: 3; k, v: 2); ``projection``'s shapes come out.

    Args:
        index: which of them.
        count: how many are fused.
        is_legacy: all of the first come before all of the second (``megatron_legacy``); else head by head.
    """

    def take(values: Array, dims: T5Dims) -> Array:
        part: Array = _by_block(values, dims, count, is_legacy)[index]
        return part if values.ndim == 1 else part.transpose(2, 0, 1)

    return take


def fused_block(is_legacy: bool = False) -> Callable[[Array, T5Dims], Array]:
    """Rearrange Megatron's fused q, k, v to [d_model, 3, heads, size_per_head]; see ``fused_part``."""

    def rearrange(values: Array, dims: T5Dims) -> Array:
        blocks = _by_block(values, dims, 3, is_legacy)
        return blocks if values.ndim == 1 else blocks.transpose(3, 0, 1, 2)

    return rearrange


def half(index: int) -> Callable[[Array, T5Dims], Array]:
    """Take the first or second half of rows, and turn a weight around: gate and value of a fused gated projection."""

    def take(values: Array, dims: T5Dims) -> Array:
        part: Array = values.reshape(2, -1, *values.shape[1:])[index]
        return part.T

    return take


def _by_block(values: Array, dims: T5Dims, count: int, is_legacy: bool) -> Array:
    """Return [count, heads, size_per_head, ...]."""
    if is_legacy:
        return values.reshape(count, -1, dims.size_per_head, *values.shape[1:])
    return values.reshape(-1, count, dims.size_per_head, *values.shape[1:]).swapaxes(0, 1)
