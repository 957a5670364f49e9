"""Weights of FP8: numbers, and beside them in the files, or made with them, the scales that they are multiplied by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from models.quantization import CHANNEL, Block, stays
from models.safetensors import StoredTensor

FP8_NUMBERS = "F8_E4M3"
SCALE_TYPES = ("fp32", "fp16", "bf16")
FORMS: Mapping[str, Block] = {"fp8": CHANNEL, "fp8_block": (128, 128)}
"""What matrices become that are quantized when they are read, by the names of ``export.model.quantization``."""
ENDS = ("_scale", "_scale_inv")
_INPUT_ENDS = ("input_scale", "activation_scale")  # llm-compressor's, ModelOpt's and AutoFP8's; transformers'
_OF_CACHE = re.compile(r"\.(kv_scale|[kv]_scale|[kv]_proj\.output_scale)$")


class Scales(NamedTuple):
    """Where the scales of a weight lie.

    Attributes:
        file: that has them.
        stored: their place in it; None: there are none, and numbers and scales are made of the weight.
        shape: of the weight that they are for.
        block: rows and columns of that weight which have one.
        first_row: of what is read in that weight.
    """

    file: str
    stored: StoredTensor | None
    shape: tuple[int, ...]
    block: Block
    first_row: int = 0

    @property
    def grid(self) -> tuple[int, int]:
        """How many there are along rows and columns."""
        return grid_of(self.shape, self.block)


class Place(NamedTuple):
    """Where a tensor lies.

    Attributes:
        file: that has it.
        scales: of numbers of FP8; None: they are what they are.
        input_scale: file and place of the scale by which what it is multiplied with is rounded; None: it is not.
    """

    file: str
    stored: StoredTensor
    scales: Scales | None = None
    input_scale: tuple[str, StoredTensor] | None = None

    def rows(self, first: int, shape: tuple[int, ...]) -> Place:
        """Return the place of some rows, of a shape together."""
        row_bytes = self.stored.size_bytes // self.stored.shape[0]
        offset, size_bytes = self.stored.offset + first * row_bytes, row_bytes * shape[0]
        stored = self.stored._replace(shape=shape, offset=offset, size_bytes=size_bytes)
        return self._replace(stored=stored, scales=self.scales and self.scales._replace(first_row=first))


def with_scales(found: Mapping[str, tuple[str, StoredTensor]], blocks: Sequence[Block]) -> dict[str, Place]:
    """Join matrices of FP8 and their scales; what has none that fit stays as it is, and so do scales of no matrix.

    Args:
        found: tensors of files.
        blocks: that scales may be for, as ``config.json`` says.
    """
    places = {name: Place(*each) for name, each in found.items()}
    for name, (_, numbers) in found.items():
        if numbers.data_type != FP8_NUMBERS or len(numbers.shape) != 2:
            continue
        beside = [name + end for end in ENDS if name + end in found]
        for block in blocks if len(beside) == 1 else ():
            file, scales = found[beside[0]]
            if scales.data_type in SCALE_TYPES and fits(scales.shape, grid_of(numbers.shape, block)):
                places[name] = places[name]._replace(scales=_scales(file, scales, numbers.shape, block))
                del places[beside[0]]
                break
    return places


def with_input_scales(places: Mapping[str, Place]) -> dict[str, Place]:
    """Join matrices of FP8 and the scales of their inputs; what does not fit stays as it is."""
    found = dict(places)
    for name, place in places.items():
        beside = [each for end in _INPUT_ENDS if (each := name.removesuffix("weight") + end) in found]
        if place.scales and len(beside) == 1:
            scale = found[beside[0]]
            if scale.stored.data_type in SCALE_TYPES and not without_ones(scale.stored.shape):
                found[name] = place._replace(input_scale=(scale.file, scale.stored))
                del found[beside[0]]
    return found


def is_unused_scale(name: str, has_cache_scales: bool) -> bool:
    """Return whether a tensor is a bound of scales of inputs, or a scale of keys or values that a cache may have."""
    return name.endswith(".input_scale_ub") or (has_cache_scales and bool(_OF_CACHE.search(name)))


def with_made_scales(places: Mapping[str, Place], form: str) -> dict[str, Place]:
    """Choose the matrices that ``export.model.quantization`` would quantize, to be quantized when they are read."""
    found = dict(places)
    for name, place in places.items():
        shape = place.stored.shape
        if len(shape) == 2 and name.endswith(".weight") and not stays(name):
            found[name] = place._replace(scales=_scales("", None, shape, FORMS[form]))
    return found


def _scales(file: str, stored: StoredTensor | None, shape: tuple[int, ...], block: Block) -> Scales:
    return Scales(file, stored, shape, (block[0] or shape[0], block[1] or shape[1]))


def grid_of(shape: Sequence[int], block: Block) -> tuple[int, int]:
    """Return how many blocks a matrix has along rows and columns."""
    rows, columns = (-(-size // (each or size)) for size, each in zip(shape, block, strict=True))
    return rows, columns


def fits(shape: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Return whether scales have a grid's shape."""
    return without_ones(shape) == without_ones(grid)


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Drop the last axes of one element: writers differ in whether scales have them."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
