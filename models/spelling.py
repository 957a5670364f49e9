"""How trainings keep the tensors of a layer: under names of their own, and several of them in one.

Nothing here copies a number: what is read is a view, and what is written goes into the view that would be read. So a
spelling has its inverse by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from models.tensor import Tensor

SizeOf = Callable[[str | int], int]
"""Resolves a symbol of a tensor's axes."""


@dataclass(frozen=True)
class Fused:
    """Tensors in one, along its first axis, which is [outer, slots, inner].

    A training rank's part of the whole has whole slots of each tensor, so that one of ``outer`` and ``inner`` is
    whatever is there.

    Attributes:
        slots: each tensor's role and how many slots in a row are its own: a symbol, or one.
        inner: symbol of a slot's width; empty: ``outer`` is one, and slots that a symbol counts are single rows, of
            which a rank's part has its share.
    """

    slots: tuple[tuple[str, str | int], ...]
    inner: str = ""

    def read(self, values: Any, role: str, size_of: SizeOf) -> Any:
        """Show one of the tensors: [outer, slots, inner, ...], without the axis of slots where it has one slot."""
        counts = [size_of(count) if isinstance(count, str) else count for _, count in self.slots]
        place = [name for name, _ in self.slots].index(role)
        first, count = sum(counts[:place]), self.slots[place][1]
        taken = slice(first, first + counts[place]) if isinstance(count, str) else first
        if self.inner:
            return values.reshape(-1, sum(counts), size_of(self.inner), *values.shape[1:])[:, taken]
        if isinstance(count, str):
            parts = sum(counts) // max(1, len(values))
            shares = [count // parts for count in counts]
            return values.reshape(sum(shares), *values.shape[1:])[sum(shares[:place]) :][: shares[place]]
        return values.reshape(sum(counts), -1, *values.shape[1:])[taken]


@dataclass(frozen=True)
class Spelling:
    """One tensor of a training's layer, and those of the model that it holds.

    Attributes:
        names: within the layer, by which it may go; ``{kind}`` stands for weight and bias.
        fused: how several tensors lie in it; None: it is one tensor.
        is_stacked: it has those of all experts, along its first axis.
        kinds: what follows a role's name; an empty one: the role is a parameter by itself, as a bias for choosing.
        sections: it lies in several of the training's, ``name.<section>`` each, one after another along
            ``section_axis`` of what is shown.
        is_centred: the training stores the norm less one where it does so with all others, and the model never does.
    """

    roles: tuple[str, ...]
    names: tuple[str, ...]
    fused: Fused | None = None
    is_stacked: bool = False
    kinds: tuple[str, ...] = ("weight", "bias")
    sections: tuple[str, ...] = ()
    is_centred: bool = False
    section_axis: ClassVar[int] = 0

    def read(self, values: Any, role: str, tensor: Tensor, size_of: SizeOf) -> Any:
        """Show one of the model's tensors, the inner structure of its axes spelled out.

        Args:
            values: of the training's tensor, or of one rank's part of it.
            role: of the model's tensor.
            tensor: that one.
            size_of: the model's sizes.
        """
        inner = role.rpartition(".")[2]
        if self.is_stacked:
            values = values[int(role.split(".")[1])]
        return self.fused.read(values, inner, size_of) if self.fused else spelled_out(values, tensor, size_of)

    def write(self, parts: Mapping[str, Any], into: Any, tensors: Mapping[str, Tensor], size_of: SizeOf) -> None:
        """Write the training's tensor: the inverse of ``read``.

        Args:
            parts: of the model, by role, as ``read`` shows them.
            into: the training's tensor, row-major.
            tensors: the model's, by role.
            size_of: the model's sizes.
        """
        for role in self.roles:
            self.read(into, role, tensors[role], size_of)[...] = parts[role]


def spelled_out(values: Any, tensor: Tensor, size_of: SizeOf) -> Any:
    """Show the inner structure of axes that are one on disk; a rank's part has its own share of the first symbol.

    A first axis of one element may be left out on disk.
    """
    values = values.reshape((1,) * (len(tensor.axes) - values.ndim) + values.shape)
    shape: list[int] = []
    for size, axis in zip(values.shape, tensor.axes, strict=True):
        inner = [size_of(symbol) for symbol in axis[1:]] if isinstance(axis, tuple) else []
        width = 1
        for each in inner:
            width *= each
        shape += [size // width, *inner]
    return values.reshape(shape)
