"""Rearrangements from training's layout to that of the Llama family. Each is a view."""

from __future__ import annotations

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import Layout, LlamaDims


def query(values: Array, dims: LlamaDims) -> Array:
    """Name the axes of the queries, whose heads lie group by group.

    Args:
        values: weight [head_num * size_per_head, hidden] (out, in) or bias [head_num * size_per_head].
        dims: of the model.

    Returns:
        weight [hidden, kv_head_num, heads_per_group, size_per_head] or bias without the first axis.
    """
    return _input_first(values.reshape(-1, dims.heads_per_group, dims.size_per_head, *values.shape[1:]), values.ndim)


def key_or_value(values: Array, dims: LlamaDims) -> Array:
    """Name the axes of the keys or the values.

    Args:
        values: weight [kv_head_num * size_per_head, hidden] (out, in) or bias [kv_head_num * size_per_head].
        dims: of the model.

    Returns:
        weight [hidden, kv_head_num, size_per_head] or bias [kv_head_num, size_per_head].
    """
    return _input_first(values.reshape(-1, dims.size_per_head, *values.shape[1:]), values.ndim)


def attention_output(weight: Array, dims: LlamaDims) -> Array:
    """Name the axes of attention's output: [hidden, head_num * size_per_head] (out, in).

    Returns:
        [kv_head_num, heads_per_group, size_per_head, hidden].
    """
    turned = weight.swapaxes(0, 1)
    return turned.reshape(-1, dims.heads_per_group, dims.size_per_head, turned.shape[1])


def query_of_groups(values: Array, dims: LlamaDims) -> Array:
    """Take the queries out of Megatron's fused rows: [groups, heads of the group + 2, size_per_head].

    Args:
        values: weight [rows, hidden] or bias [rows]; a part of one training rank has whole groups.
        dims: of the model.

    Returns:
        As ``query``.
    """
    return _input_first(_groups(values, dims)[:, : dims.heads_per_group], values.ndim)


def key_of_groups(values: Array, dims: LlamaDims) -> Array:
    """Take the keys out of Megatron's fused rows; see ``query_of_groups`` and ``key_or_value``."""
    return _input_first(_groups(values, dims)[:, dims.heads_per_group], values.ndim)


def value_of_groups(values: Array, dims: LlamaDims) -> Array:
    """Take the values out of Megatron's fused rows; see ``query_of_groups`` and ``key_or_value``."""
    return _input_first(_groups(values, dims)[:, dims.heads_per_group + 1], values.ndim)


def half(index: int) -> Layout:
    """Make the layout that takes the gate (0) or the other half (1) out of a fused linear layer: [gate; up] rows.

    A training rank's part holds the rank's own gate and up, and what is not cut holds all of them: both are halves.
    """

    def taken(values: Array, dims: LlamaDims) -> Array:
        return _input_first(values.reshape(2, -1, *values.shape[1:])[index], values.ndim)

    return taken


def _groups(values: Array, dims: LlamaDims) -> Array:
    return values.reshape(-1, dims.heads_per_group + 2, dims.size_per_head, *values.shape[1:])


def _input_first(values: Array, source_axes: int) -> Array:
    """Move the last axis of a weight, its input, to the front; a bias, which had one axis, has none."""
    return values if source_axes == 1 else values.transpose(-1, *range(values.ndim - 1))
