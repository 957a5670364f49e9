"""Rearrangements from training's layout to FasterTransformer's. Each is a view."""

from __future__ import annotations

import numpy as np

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import Layout, ModelDims


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
    """Rearrange Megatron's fused QKV into FasterTransformer's block order.

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


def qkv_by_block_to_block(values: Array, dims: ModelDims) -> Array:
    """Rearrange the fused QKV of Megatron-LM's first checkpoints and of NeMo's ``megatron_legacy``. Its own inverse.

    Args:
        values: weight [3 * head_num * size_per_head, hidden] (out, in) or bias: all q, then all k, then all v.
        dims: of the model.

    Returns:
        weight [hidden, 3, head_num, size_per_head] or bias [3, head_num, size_per_head].
    """
    blocks = values.reshape(3, -1, dims.size_per_head, *values.shape[1:])
    return blocks if values.ndim == 1 else blocks.transpose(3, 0, 1, 2)


def qkv_by_element_to_block(values: Array, dims: ModelDims) -> Array:
    """Rearrange the fused QKV of Megatron-LM's checkpoint version 1, where q, k and v alternate element by element.

    Args:
        values: weight [head_num * size_per_head * 3, hidden] (out, in) or bias [head_num * size_per_head * 3].
        dims: of the model.

    Returns:
        weight [hidden, 3, head_num, size_per_head] or bias [3, head_num, size_per_head].
    """
    by_head = values.reshape(-1, dims.size_per_head, 3, *values.shape[1:])
    return by_head.transpose(2, 0, 1) if values.ndim == 1 else by_head.transpose(3, 2, 0, 1)


def qkv_by_group_to_block(heads_per_group: int) -> Layout:
    """Make the layout that gives each head of a group its own copy of the group's key and value.

    FasterTransformer's GPT has a key and a value for every head; copies compute the same function. Source rows, by
    megatron-core's ``attention.py``: [groups, heads of the group + 2, size_per_head].

    Args:
        heads_per_group: query heads that share one key and value.
    """

    def expanded(values: Array, dims: ModelDims) -> Array:
        groups = values.reshape(-1, heads_per_group + 2, dims.size_per_head, *values.shape[1:])
        key, value = groups[:, heads_per_group, None], groups[:, heads_per_group + 1, None]
        query = groups[:, :heads_per_group]
        copies = [query, np.broadcast_to(key, query.shape), np.broadcast_to(value, query.shape)]
        blocks: Array = np.stack(copies).reshape(3, -1, *query.shape[2:])
        return blocks if values.ndim == 1 else blocks.transpose(3, 0, 1, 2)

    return expanded


def plus_one(values: Array, dims: ModelDims) -> Array:
    """Undo LayerNorm1P's storage: its weights are kept less one."""
    return np.asarray(values + np.float32(1))


def less_one(values: Array, dims: object) -> Array:
    """Store a norm's weights as Nemotron and Gemma do, which add the one when they multiply."""
    return np.asarray(values - np.float32(1))
