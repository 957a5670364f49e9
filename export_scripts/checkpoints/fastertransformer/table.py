"""The table of a checkpoint that is FasterTransformer's already: each file becomes itself, or the tensors in it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.schema import Layout, Rule, Rules, SourceMap, split_layer
from ft_format.layout import Dims, Table, TensorSpec, part_names, turned_axes


def table_of(schema: Table, tensors: Table, ranks: int, name: str = "FT checkpoint", kv_ranks: int = 1) -> SourceMap:
    """Make the table of a checkpoint that is its own schema.

    Args:
        schema: every file by name.
        tensors: the model's own tensors, which may be other ones.
        ranks: that its files are cut for.
        name: of the format, for people.
        kv_ranks: for how many ranks heads of keys and values were copied; 1: they were not.
    """
    rules: dict[str | tuple[str, ...], Rules] = {}
    copies, taken = dict[str, str](), set[str]()
    for file, target in schema.items():
        pattern = split_layer(file)[0]
        if target.origin in taken:
            copies[file] = "the tied copy of the embedding"
            continue
        taken |= {target.origin} - {""}
        whole = _times(ranks) if target.is_summed and ranks > 1 else None
        rules[pattern] = tuple(
            Rule(
                split_layer(each.origin or part)[0],
                _own(_part(target, each), each, tensors[each.origin or part]),
                target.split_axis,
                elementwise=whole,
                ranks=kv_ranks,
            )
            for part, each in part_names(file, target).items()
        )
    ignored = copies | {"shared.weight": "T5's embedding turned around, which no loader reads"}
    if any(target.is_summed for target in schema.values()):
        reason = "in mlp.attention.bias.sum"
        ignored |= {f"model.layers.*.{name}": reason for name in ("attention.dense.bias", "mlp.dense_4h_to_h.bias")}
    return SourceMap(name, rules, ignored, biases={"*": True})


def _own(layout: Layout, target: TensorSpec, own: TensorSpec) -> Layout:
    """Turn a tensor around whose axes the model's own has in the other order."""
    if target.shape == own.shape:
        return layout
    order = [turned_axes(own.shape).index(axis) for axis in range(len(turned_axes(own.shape)))]

    def turned(values: Array, dims: Dims) -> Array:
        return layout(values, dims).transpose(order)

    return turned


def _part(target: TensorSpec, part: TensorSpec) -> Layout:
    """Take one of the tensors out of a file; each has its share of whatever a rank's file holds."""
    spelled_out, axis = _spelled_out(part), target.split_axis
    if part is target or axis is None:
        return spelled_out

    def taken(values: Array, dims: Dims) -> Array:
        sizes = [each.shard_shape(dims, 1)[axis] for _, each in target.parts]
        index = [each is part for _, each in target.parts].index(True)
        start, stop = (values.shape[axis] * sum(sizes[:n]) // sum(sizes) for n in (index, index + 1))
        place: tuple[Any, ...] = (*(slice(None),) * axis, slice(start, stop))
        return spelled_out(values[place], dims)

    return taken


def _spelled_out(target: TensorSpec) -> Layout:
    """Show the inner structure of axes that are one on disk."""

    def reshape(values: Array, dims: Dims) -> Array:
        shape: list[int] = []
        for size, axis in zip(values.shape, target.shape, strict=True):
            inner = [dims.axis_size(part) for part in axis[1:]] if isinstance(axis, tuple) else []
            shape += [size // prod(inner), *inner]
        return values.reshape(shape)

    return reshape


def _times(ranks: int) -> Callable[[Array, Any], Array]:
    """Undo the share of each rank in what the ranks sum up."""

    def multiply(values: Array, dims: Any) -> Array:
        whole: Array = values * np.float32(ranks)
        return whole

    return multiply
