"""What a table of FasterTransformer's tensors is made of, and the files that such a table comes to."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple, Protocol

from ft_format.config_ini import ConfigIniError

Symbol = str | int | tuple[str | int, ...]
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Bytes of one number, by the ``weight_data_type`` of config.ini."""
MOST_LAYERS = 10_000
"""Largest number of layers that is read: each layer is a dozen tensors to list."""
LARGEST = 2**31 - 1
"""Largest dimension that is read: FasterTransformer counts in C's int."""
KV_HEADS, QUERY_GROUP = "kv_head_num", "heads_per_group"
"""Symbols of the axis of heads of keys and values, and of that, behind it, of the query heads that share one."""
_LAYERS = ("num_layer", "encoder_layer_num", "decoder_layer_num")


class Dims(Protocol):
    """Dimensions of a model: a decoder of models/, or a family's own."""

    def axis_size(self, symbol: str | int) -> int:
        """Resolve one symbol of a shape."""

    def for_ranks(self, ranks: int, /) -> Dims:
        """Return the dimensions that the files for a number of ranks have: the model's, unless heads are copied."""


class FtDims:
    """Dimensions in FasterTransformer's words; a family's are a dataclass that derives from this one.

    Attributes:
        error: raised with a problem and a hint where a dimension is larger than any model's.
    """

    error: ClassVar[type[Exception]] = ConfigIniError

    def __post_init__(self) -> None:
        """Compare every number with the largest that is read."""
        for name, value in vars(self).items():
            most = MOST_LAYERS if name in _LAYERS else LARGEST
            if isinstance(value, int) and value > most:
                raise self.error(f"{name} is {reprlib.repr(value)}, which no model has", f"the most is {most:,}")

    def axis_size(self, symbol: str | int) -> int:
        """Resolve one symbol of a shape."""
        return symbol if isinstance(symbol, int) else int(getattr(self, symbol))

    def for_ranks(self, ranks: int) -> FtDims:
        """Return itself: no heads are copied."""
        return self


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of FasterTransformer's layout.

    Attributes:
        shape: symbols of the model's Dims, or numbers; a tuple of symbols is one axis on disk that has inner
            structure, as ("head_num", "size_per_head").
        split_axis: axis of ``shape`` that tensor_para_size divides; None: written once, for all ranks.
        is_summed: every rank adds it before the ranks' sum, so that the file holds 1 / tensor_para_size of it.
        origin: name of the model's own tensor (models/) that it holds, of a family whose tensors are not
            FasterTransformer's; its axes are in the same order or turned around.
        parts: tensors whose shares of a rank lie side by side along the split axis in the rank's file, each by the word
            that its name has in place of the last but one of the file's name; empty: the file holds one tensor.
    """

    shape: tuple[Symbol, ...]
    split_axis: int | None = None
    is_summed: bool = False
    parts: tuple[tuple[str, TensorSpec], ...] = ()
    origin: str = ""

    def full_shape(self, dims: Dims) -> tuple[int, ...]:
        """Shape of the whole tensor with inner structure spelled out, as layouts return it."""
        return tuple(
            dims.axis_size(part) for axis in self.shape for part in (axis if isinstance(axis, tuple) else (axis,))
        )

    def shard_shape(self, dims: Dims, tensor_para_size: int) -> tuple[int, ...]:
        """Shape of one rank's file."""
        sizes = [
            prod(dims.axis_size(part) for part in axis) if isinstance(axis, tuple) else dims.axis_size(axis)
            for axis in self.shape
        ]
        if self.split_axis is not None:
            sizes[self.split_axis] //= tensor_para_size
        return tuple(sizes)

    def files(self, name: str, tensor_para_size: int) -> tuple[str, ...]:
        """Names of the tensor's files, in the order of ranks."""
        if self.split_axis is None:
            return (f"{name}.bin",)
        return tuple(f"{name}.{rank}.bin" for rank in range(tensor_para_size))


def symbols_of(spec: TensorSpec) -> tuple[str | int, ...]:
    """List the symbols of a tensor's axes, inner structure spelled out."""
    return tuple(part for axis in spec.shape for part in (axis if isinstance(axis, tuple) else (axis,)))


def turned_axes(shape: tuple[Symbol, ...]) -> tuple[int, ...]:
    """Order the axes of a matrix as it is turned around, inner structure spelled out."""
    counts = [len(axis) if isinstance(axis, tuple) else 1 for axis in shape]
    return (*range(counts[0], sum(counts)), *range(counts[0]))


Table = Mapping[str, TensorSpec]
"""Every tensor of a model by name, without ``.<rank>.bin``."""


class StoredTensor(NamedTuple):
    """One tensor of a model whose dimensions are known.

    Attributes:
        shape: of the whole tensor, as it is on disk.
        split_axis: axis along which the ranks cut it; None: written once.
        is_summed: every rank adds it before the ranks' sum.
        parts: widths, along that axis, of the tensors whose shares of a rank lie side by side in the rank's file;
            empty: the file holds one tensor.
    """

    shape: tuple[int, ...]
    split_axis: int | None
    is_summed: bool
    parts: tuple[int, ...] = ()


def stored(table: Table, dims: Dims) -> dict[str, StoredTensor]:
    """Resolve a table's shapes by a model's dimensions."""
    return {
        name: StoredTensor(spec.shard_shape(dims, 1), spec.split_axis, spec.is_summed, _part_widths(spec, dims))
        for name, spec in table.items()
    }


def _part_widths(spec: TensorSpec, dims: Dims) -> tuple[int, ...]:
    return tuple(part.shard_shape(dims, 1)[part.split_axis or 0] for _, part in spec.parts)


def part_names(name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
    """Name the tensors that a file holds: those of its parts, or itself.

    ``a.query_key_value.weight`` with the parts query, key and value gives ``a.query.weight`` and so on.
    """
    if not spec.parts:
        return {name: spec}
    stem, _, last = name.rpartition(".")
    return {f"{stem.rpartition('.')[0]}.{part}.{last}": each for part, each in spec.parts}


def whole_tensors(table: Table) -> dict[str, TensorSpec]:
    """List a model's tensors as they are before ranks share them: each part of a file by its own name."""
    return {part: each for name, spec in table.items() for part, each in part_names(name, spec).items()}


def in_every_layer(layer: Table, count: int) -> dict[str, TensorSpec]:
    """Name the tensors of a decoder's layers."""
    return {f"model.layers.{index}.{name}": spec for index in range(count) for name, spec in layer.items()}


def file_sizes(table: Table, dims: Dims, tensor_para_size: int, data_type: str) -> dict[str, int]:
    """List the files of a model: name to bytes; a tensor without numbers has no file."""
    sizes = {
        file: prod(spec.shard_shape(dims, tensor_para_size)) * ITEM_BYTES[data_type]
        for name, spec in table.items()
        for file in spec.files(name, tensor_para_size)
    }
    return {file: size for file, size in sizes.items() if size}
