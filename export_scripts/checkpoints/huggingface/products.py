"""Tensors that no checkpoint holds, because they are two of its tensors multiplied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from export_scripts.checkpoints.tensor_values import read_whole
from export_scripts.tensors.dtypes import Array
from export_scripts.weights.architecture import Product
from export_scripts.weights.schema import Computed, LazyTensor
from handover.errors import CheckpointError


@dataclass(frozen=True)
class MultipliedTensor(Computed):
    """A matrix of rows behind a linear layer without a bias; computed in fp32, where it is asked for.

    Attributes:
        rows: [row, inner].
        weight: [inner, outer], or [outer, inner] where ``is_transposed``.
        is_transposed: the layer's weight stands as torch's Linear keeps it: [out, in].
    """

    rows: LazyTensor
    weight: LazyTensor
    is_transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape, per axis."""
        return (self.rows.shape[0], self.weight.shape[0 if self.is_transposed else 1])

    @property
    def sources(self) -> tuple[LazyTensor, ...]:
        """The factors."""
        return self.rows, self.weight

    def parts(self) -> tuple[Array, ...]:
        """Multiply; both factors and the product are held whole meanwhile.

        Raises:
            CheckpointError: a factor cannot be read or is damaged.
        """
        weight = read_whole(self.weight)
        return (read_whole(self.rows) @ (weight.T if self.is_transposed else weight),)


def with_products(tensors: Mapping[str, LazyTensor], products: Mapping[str, Product]) -> Mapping[str, LazyTensor]:
    """Put products in the place of their factors.

    Raises:
        CheckpointError: a factor is missing, or two do not fit together.
    """
    made: dict[str, LazyTensor] = {}
    for key, product in products.items():
        if absent := [name for name in (product.rows, product.weight) if name not in tensors]:
            raise CheckpointError(f"{', '.join(absent)}  missing: {key} is {product.rows} times {product.weight}")
        rows, weight = tensors[product.rows], tensors[product.weight]
        inner = weight.shape[1 if product.is_transposed else 0] if len(weight.shape) == 2 else None
        if len(rows.shape) != 2 or rows.shape[1] != inner:
            raise CheckpointError(
                f"{product.rows}  {list(rows.shape)} and {product.weight}  {list(weight.shape)}  cannot be multiplied"
            )
        made[key] = MultipliedTensor(rows, weight, product.is_transposed)
    factors = {name for product in products.values() for name in (product.rows, product.weight)}
    return {**{key: tensor for key, tensor in tensors.items() if key not in factors}, **made}
