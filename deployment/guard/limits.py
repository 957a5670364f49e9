"""What a client may send at most, and how it is told. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

HEADER_BYTES = 8 << 20
"""Of what describes a request: JSON, or a message without its raw tensors. Larger tensors are sent in binary form."""

MOST_TENSORS = 1024
"""Inputs of a request, and outputs that it asks for."""

DEEPEST = 64
"""Lists and objects within each other in JSON; Triton's parser calls itself for each."""

MOST_LISTS = 65_536
"""In the JSON of a request, with its objects; an input has three, and one for each row where its data are nested."""

_MOST_DIMENSIONS = 64
_MOST_ELEMENTS = 1 << 40
_LONGEST_NAME = 60
_SIZES = {
    **dict.fromkeys(("BOOL", "INT8", "UINT8"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FP32"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FP64"), 8),
}
TEXT = "BYTES"
_LENGTH_BYTES = 4
"""A length stands before each text of a tensor of texts."""


class RefusedError(Exception):
    """A request that Triton shall not see."""

    def __init__(self, problem: str, status: int = 400) -> None:
        super().__init__(problem, status)  # both, or it would not come back from another process as it was
        self.problem, self.status = problem, status


@dataclass
class Memory:
    """Bytes of requests that are not yet whole, or that Triton has not yet taken, of all connections together.

    Attributes:
        most: bytes at a time.
        used: now.
    """

    most: int
    used: int = 0

    def take(self, count: int) -> bool:
        """Note more bytes; False: there is no room, and nothing was noted."""
        if self.used + count > self.most:
            return False
        self.used += count
        return True

    def give_back(self, count: int) -> None:
        """Note that bytes are gone."""
        self.used -= count


def check_count(kind: str, count: int) -> None:
    """Refuse too many inputs or outputs."""
    if count > MOST_TENSORS:
        raise RefusedError(f"the request has {count} {kind}; at most {MOST_TENSORS} are taken")


def check_binary(name: object, datatype: object, shape: Sequence[object], given_bytes: int) -> None:
    """Compare a tensor's shape and type with the bytes that it is given; a type that is none is Triton's to refuse."""
    taken = binary_bytes(name, datatype, shape)
    if given_bytes in taken:
        return
    if len(taken) == 1:
        raise RefusedError(
            f"{shown(name)} has {given_bytes} bytes, but its shape and type {datatype} take {taken.start}"
        )
    elements = count_elements(name, shape)
    raise RefusedError(f"{shown(name)} has {given_bytes} bytes, too few for the {elements} elements of its shape")


def binary_bytes(name: object, datatype: object, shape: Sequence[object]) -> range:
    """Return the numbers of bytes that a tensor of a shape and type may be given."""
    elements = count_elements(name, shape)
    size = _SIZES.get(datatype) if isinstance(datatype, str) else None
    if size is not None:
        return range(elements * size, elements * size + 1)
    return range(elements * (_LENGTH_BYTES if datatype == TEXT else 1), sys.maxsize)


def check_values(name: object, shape: Sequence[object], given: int) -> None:
    """Compare a tensor's shape with the number of values that it is given."""
    elements = count_elements(name, shape)
    if elements != given:
        raise RefusedError(f"{shown(name)} has {given} values, but its shape takes {elements}")


def count_elements(name: object, shape: Sequence[object]) -> int:
    """Multiply a shape's dimensions, of which no product may come near to what overflows in Triton."""
    if len(shape) > _MOST_DIMENSIONS:
        raise RefusedError(f"{shown(name)} has a shape of {len(shape)} dimensions")
    elements = product = 1
    for length in shape:
        if type(length) is not int or length < 0:
            raise RefusedError(f"{shown(name)} has a shape with a dimension that is no length")
        elements *= length
        product *= length or 1
    if product > _MOST_ELEMENTS:
        raise RefusedError(f"{shown(name)} has a shape that no request can fill")
    return elements


def shown(name: object) -> str:
    """Name a tensor of the client's in a message: one line of plain letters, shortened."""
    text = ascii(name)
    return f"input {text if len(text) <= _LONGEST_NAME else text[:_LONGEST_NAME] + '...'}"
