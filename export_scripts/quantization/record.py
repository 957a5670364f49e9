"""What a quantization is: which tensors come out of one, how some of its rows become bytes, and what it is called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from export_scripts.tensors.dtypes import Array

Shape = tuple[int, ...]
WORDS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
"""Safetensors' words for the types of weights."""


@dataclass(frozen=True)
class Output:
    """One of the tensors that a quantized tensor becomes.

    Attributes:
        kind: safetensors' word for its data type.
        item_bytes: of one number.
        rows: of the quantized matrix that a row of this one stands for.
        content: all of it, where it does not depend on weights; empty: it does.
    """

    name: str
    kind: str
    shape: Shape
    item_bytes: int
    rows: int = 1
    content: bytes = b""

    @property
    def size_bytes(self) -> int:
        """Bytes of all of it."""
        return prod(self.shape) * self.item_bytes

    def place(self, start: int, stop: int) -> tuple[int, int]:
        """Return where bytes of some rows of the matrix begin and end; ``start`` is a multiple of ``rows``."""
        if self.content:
            return (0, 0 if start else self.size_bytes)
        row_bytes = self.size_bytes // self.shape[0]
        return start // self.rows * row_bytes, -(-stop // self.rows) * row_bytes


@dataclass(frozen=True)
class Encoded:
    """Some rows of a matrix, quantized.

    Attributes:
        contents: of each output that depends on weights, in their order.
        squared_errors: of each row, what the numbers that come back differ by.
        squares: of each row's numbers.
    """

    contents: tuple[Array, ...]
    squared_errors: Array
    squares: Array


class Quantization(ABC):
    """One way of quantizing the linear layers of a model.

    Attributes:
        name: as ``export.model.quantization`` has it.
        rows: of a matrix that have numbers in common: rows are encoded in multiples of it.
        grain: rows and columns of which a rank of tensor parallelism must have a multiple of each matrix that is split.
        model_types: the models that it is for; empty: for all.
    """

    name: ClassVar[str]
    rows: ClassVar[int] = 1
    grain: ClassVar[tuple[int, int]] = (1, 1)
    model_types: ClassVar[tuple[str, ...]] = ()

    def takes(self, name: str, shape: Shape) -> bool:
        """Whether a tensor of a layer is quantized, unless it is one of those that always stay."""
        return name.endswith(".weight") and len(shape) == 2

    @abstractmethod
    def outputs(self, name: str, shape: Shape, data_type: str) -> tuple[Output, ...]:
        """List what a tensor becomes, the quantized numbers first; ``data_type`` is that of the other weights."""

    @abstractmethod
    def encode(self, values: Array, data_type: str) -> Encoded:
        """Quantize some rows.

        Args:
            values: rows of a tensor of fp32, fp16 or bf16, as they are stored; all finite.
            data_type: which of them.
        """

    @abstractmethod
    def config(self, stays: Sequence[str]) -> dict[str, Any]:
        """Return ``quantization_config`` of config.json; ``stays`` names the modules that are not quantized."""

    def problem(self, shape: Shape) -> str:
        """Return why a tensor cannot be quantized; empty: it can."""
        return ""
