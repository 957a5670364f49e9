"""Rearrangements from training's layout to FasterTransformer's. Each is a view and names its inverse."""

from __future__ import annotations

from export_scripts.dtypes import Array
from export_scripts.weights.schema import ModelDims


def unchanged(values: Array, dims: ModelDims) -> Array:
    """Return the tensor as it is: embeddings, norms, biases. Its own inverse."""
    return values


def transposed(weight: Array, dims: ModelDims) -> Array:
    """Turn a linear layer's weight around. Its own inverse.

    Args:
        weight: [out, in], torch's order.
        dims: not needed.

    Returns:
        [in, out], FasterTransformer's order.
    """
    return weight.swapaxes(0, 1)


def qkv_by_head_to_block(values: Array, dims: ModelDims) -> Array:
    """Rearrange Megatron's fused QKV into FasterTransformer's block order; ``qkv_block_to_by_head`` is the inverse.

    Megatron keeps q, k and v of one head side by side; FasterTransformer keeps all q, then all k, then all v.

    Args:
        values: weight [head_num * 3 * size_per_head, hidden] (out, in) or bias [head_num * 3 * size_per_head].
        dims: of the model.

    Returns:
        weight [hidden, 3, head_num, size_per_head] or bias [3, head_num, size_per_head]; splitting the head axis
        yields tensor_para ranks of [hidden, 3, local].
    """
    by_head = values.reshape(-1, 3, dims.size_per_head, *values.shape[1:])  # -1: one rank's part has its own heads
    blocks = by_head.swapaxes(0, 1)
    return blocks if values.ndim == 1 else blocks.transpose(3, 0, 1, 2)


def qkv_block_to_by_head(blocks: Array, dims: ModelDims) -> Array:
    """Undo ``qkv_by_head_to_block``.

    Args:
        blocks: [hidden, 3, head_num, size_per_head] or [3, head_num, size_per_head].
        dims: of the model.

    Returns:
        [head_num * 3 * size_per_head, hidden] or [head_num * 3 * size_per_head].
    """
    rows = dims.head_num * 3 * dims.size_per_head
    if blocks.ndim == 3:
        return blocks.swapaxes(0, 1).reshape(rows)
    return blocks.transpose(2, 1, 3, 0).reshape(rows, blocks.shape[0])
