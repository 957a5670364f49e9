"""One tensor of a model: its axes by symbol, and along which of them tensor parallelism cuts it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

Axis = str | int | tuple[str | int, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor as transformers saves it: a linear layer's weight is [out, in].

    Attributes:
        axes: sizes of the model by symbol, or numbers; a tuple of them is one axis on disk that has inner structure, as
            ("kv_head_num", "size_per_head").
        split_axis: axis that tensor parallelism cuts; None: every rank has all of it.
        shape: sizes of ``axes``; empty in a block's own list, which knows no sizes.
        stays_fp32: whether its numbers keep all their digits where the weights have fewer.
    """

    axes: tuple[Axis, ...]
    split_axis: int | None = None
    shape: tuple[int, ...] = ()
    stays_fp32: bool = False

    @property
    def bias(self) -> Tensor:
        """The bias of a linear layer whose weight this is: what the ranks sum up, each of them has."""
        return Tensor(self.axes[:1], 0 if self.split_axis == 0 else None)

    def sized(self, size_of: Callable[[str | int], int]) -> Tensor:
        """Resolve the symbols."""
        sizes = [prod(map(size_of, axis)) if isinstance(axis, tuple) else size_of(axis) for axis in self.axes]
        return replace(self, shape=tuple(sizes))
