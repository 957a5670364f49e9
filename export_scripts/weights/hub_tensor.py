"""What a table of a Hugging Face model is made of: it is read and written by the same line for each tensor.

A line says which of the family's full, unsplit tensors a model's tensor is, or a part of which. It names axes and no
sizes. Bytes in row-major order do not depend on whether neighbouring axes are merged, so that a tensor is written by
its family's axes, in another order, and only its header has the merged shape; where a source had the same order, its
views are contiguous again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import prod

import numpy as np

from export_scripts.tensors.dtypes import Array
from export_scripts.weights.layouts import unchanged
from export_scripts.weights.schema import Elementwise, Layout, Rule, Rules, Shape, Sources
from ft_format.layout import Dims, Table

TURNED = (1, 0)
"""Order of the axes of a linear layer's weight: torch keeps [out, in], FasterTransformer [in, out]."""


@dataclass(frozen=True)
class HubTensor:
    """One tensor of a Hugging Face model, and the family's tensor that it is taken from.

    Attributes:
        pivot: the family's name of that tensor; empty: it is the model's own.
        order: of its axes, inner structure spelled out, as ``numpy.transpose`` takes it; empty: as they are.
        merged: how many axes that follow one another then make each axis of the result; empty: one each.
        part: axis, start and stop of what is taken, of the axes before they are ordered; None: all of it.
        rows_before: rows of zeros that come before the first.
        is_zeros: all of it is zeros, in the shape that would be taken: the family has one tensor for the sum of this
            and another, so that both are added where they are read.
        elementwise: a function of fp32 values, applied last where it is written.
        stays_fp32: it is of fp32 whatever the other weights are.
        layout: how it is read where that is no order of axes; a table that has one is not written.
    """

    pivot: str
    order: tuple[int, ...] = ()
    merged: tuple[int, ...] = ()
    part: tuple[int, int, int] | None = None
    rows_before: int = 0
    is_zeros: bool = False
    elementwise: Elementwise | None = None
    stays_fp32: bool = False
    layout: Layout | None = None

    def axes(self, pivot_shape: Shape) -> Shape:
        """Work out the shape as it is written: no axis is merged, those of one element are left out."""
        sizes = self._sizes(pivot_shape)
        if self.rows_before:
            return (sizes[0] + self.rows_before, *sizes[1:])
        return tuple(size for size in sizes if size != 1) or (1,)

    def shape(self, pivot_shape: Shape) -> Shape:
        """Work out the shape in the file's header."""
        rows, *others = map(prod, self._groups(pivot_shape))
        return (rows + self.rows_before, *others)

    def laid_out(self, pivot_shape: Shape) -> Layout:
        """Return how it is shown as the family's tensor, or as its part of it."""
        is_plain = not (self.order or self.merged or self.rows_before)
        return unchanged if is_plain else partial(self._shown, pivot_shape)

    def _shown(self, pivot_shape: Shape, values: Array, dims: object) -> Array:
        kept = values[self.rows_before :]
        groups = zip(kept.shape, self._groups(pivot_shape), strict=True)
        apart = kept.reshape([size for whole, group in groups for size in _apart(whole, group)])
        return apart.transpose(np.argsort(self.order)) if self.order else apart

    def _sizes(self, pivot_shape: Shape) -> list[int]:
        sizes = list(pivot_shape)
        if self.part:
            axis, start, stop = self.part
            sizes[axis] = stop - start
        return [sizes[axis] for axis in self.order or range(len(sizes))]

    def _groups(self, pivot_shape: Shape) -> list[list[int]]:
        """List the sizes of the axes that make each axis of the file."""
        sizes, groups, first = self._sizes(pivot_shape), [], 0
        for count in self.merged or (1,) * len(sizes):
            groups.append(sizes[first : first + count])
            first += count
        assert first == len(sizes), f"{self.pivot}: merged {self.merged} of {sizes}"
        return groups


def _apart(whole: int, group: list[int]) -> list[int]:
    """Divide an axis of a file into those that it is made of; of a wrong size, the first of more than one differs."""
    if whole == prod(group):
        return group
    place = next((place for place, size in enumerate(group) if size != 1), 0)
    return [*group[:place], whole // max(1, prod(group) // max(1, group[place])), *group[place + 1 :]]


def both(name: str, pivot: str, order: tuple[int, ...] = ()) -> dict[str, HubTensor]:
    """List the weight of a norm or a linear layer, whose axes have that order, and its bias."""
    return {f"{name}.weight": HubTensor(f"{pivot}.weight", order=order), f"{name}.bias": HubTensor(f"{pivot}.bias")}


def qkv_by_head(name: str, pivot: str) -> dict[str, HubTensor]:
    """List a fused layer that has q, k and v of one head side by side."""
    return {
        f"{name}.weight": HubTensor(f"{pivot}.weight", order=(2, 1, 3, 0), merged=(3, 1)),
        f"{name}.bias": HubTensor(f"{pivot}.bias", order=(1, 0, 2), merged=(3,)),
    }


def thirds(names: Iterable[str], pivot: str) -> dict[str, HubTensor]:
    """List the weights of q, k and v, of which the family has one."""
    return {
        f"{name}.weight": HubTensor(f"{pivot}.weight", part=(1, index, index + 1), order=(1, 2, 3, 0), merged=(3, 1))
        for index, name in enumerate(names)
    }


def in_layers(prefix: str, layer: Mapping[str, HubTensor]) -> dict[str, HubTensor]:
    """Complete the names of one layer's tensors: ``ln_1.weight`` becomes ``<prefix>ln_1.weight``.

    Args:
        prefix: of the model's layers, as ``transformer.h.{layer}.``.
        layer: its tensors, each of a ``pivot`` as it follows ``model.layers.{layer}.``.
    """
    return {
        prefix + name: replace(tensor, pivot=f"model.layers.{{layer}}.{tensor.pivot}") for name, tensor in layer.items()
    }


def in_every_layer(tensors: Mapping[str, HubTensor], count: int) -> dict[str, HubTensor]:
    """Name the tensors of that many layers, which follow one another in the table."""
    return {
        name.format(layer=layer): replace(tensor, pivot=tensor.pivot.format(layer=layer))
        for is_layer, run in groupby(tensors.items(), lambda item: "{layer}" in item[0])
        for group in (tuple(run),)
        for layer in range(count if is_layer else 1)
        for name, tensor in group
    }


def rules_of(tensors: Mapping[str, HubTensor], schema: Table, dims: Dims) -> dict[Sources, Rules]:
    """Return how a model's tensors are read.

    Args:
        tensors: of its table; several of one ``pivot`` are its parts, or are added where one of them is zeros.
        schema: of the family's tensors.
        dims: of the model.
    """
    by_pivot: dict[str, dict[str, HubTensor]] = {}
    for name, tensor in tensors.items():
        by_pivot.setdefault(tensor.pivot, {})[name] = tensor
    rules: dict[Sources, Rules] = {}
    for pivot, held in by_pivot.items():
        names, tensor = tuple(held), next(each for each in held.values() if not each.is_zeros)
        spec = schema.get(pivot.format(layer=0))
        layout = tensor.layout or (tensor.laid_out(spec.full_shape(dims)) if spec else unchanged)
        axis = tensor.part[0] if tensor.part else None
        rules[names if len(names) > 1 else names[0]] = Rule(pivot, layout, concat_axis=axis)
    return rules
