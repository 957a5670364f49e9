"""JSON as Triton's HTTP door reads it: checked without trusting that two parsers understand it alike."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from deployment.guard.limits import (
    DEEPEST,
    HEADER_BYTES,
    MOST_LISTS,
    RefusedError,
    check_binary,
    check_count,
    check_values,
    count_elements,
    shown,
)

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
"""Or what begins as one and has no end."""

_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""What a bracket adds to the depth, as a signed byte."""
_SHARED_MEMORY = "shared_memory_region"


def check_json(body: bytes, binary_bytes: int = 0) -> None:
    """Check a body of JSON, or the JSON before binary tensors.

    Args:
        body: the JSON alone.
        binary_bytes: of the tensors behind it.

    Raises:
        RefusedError: Triton shall not parse it, or an input's shape does not fit what is given for it.
    """
    check_json_length(len(body))
    _check_nesting(body)
    request = _parse(body)
    if not isinstance(request, dict):
        return
    inputs, outputs = request.get("inputs"), request.get("outputs")
    if isinstance(outputs, list):
        check_count("outputs", len(outputs))
    if isinstance(inputs, list):
        check_count("inputs", len(inputs))
        described = [each for each in inputs if isinstance(each, dict)]
        left = binary_bytes - sum(_check_input(each, binary_bytes) for each in described)
        if left < 0:
            raise RefusedError(f"the inputs have {-left} binary bytes more than the body has")
        if left and binary_bytes:
            raise RefusedError(f"the body has {left} binary bytes that belong to no input")


def check_json_length(size: int) -> None:
    """Refuse JSON that is too long."""
    if size > HEADER_BYTES:
        problem = f"the request has {size} bytes of JSON; at most {HEADER_BYTES} are taken, tensors can be binary"
        raise RefusedError(problem, 413)


def _check_nesting(body: bytes) -> None:
    """Refuse what nests deeply, or has lists without end; both parsers take strings as they are taken here."""
    if sum(map(body.count, (b"[", b"{"))) <= DEEPEST:
        return
    brackets = array("b", _STRING.sub(b"", body).translate(_STEPS, _NO_BRACKETS))
    if max(accumulate(brackets), default=0) > DEEPEST:
        raise RefusedError(f"the JSON nests deeper than {DEEPEST} lists and objects")
    if (count := brackets.count(1)) > MOST_LISTS:
        raise RefusedError(f"the JSON has {count} lists and objects; at most {MOST_LISTS} are taken")


def _parse(body: bytes) -> Any:
    try:
        # Bytes that are no UTF-8 stay what they are: Triton takes them.
        return _DECODER.decode(body.decode("utf-8", "surrogateescape"))
    except ValueError as error:
        raise RefusedError(f"failed to parse the request JSON buffer: {error}") from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; of two values for a key Triton takes the first, and Python the last."""
    made = dict(pairs)
    if len(made) != len(pairs):
        raise RefusedError("the JSON has an object with a key that is there twice")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repetition)


def _check_input(tensor: dict[str, Any], binary_bytes: int) -> int:
    """Check one input; returns the binary bytes that it takes."""
    name, shape, parameters = tensor.get("name"), tensor.get("shape"), tensor.get("parameters")
    if not isinstance(shape, list):
        return 0  # Triton says what is missing
    settings = parameters if isinstance(parameters, dict) else {}
    if _SHARED_MEMORY in settings:
        count_elements(name, shape)
        return 0
    if (size := settings.get("binary_data_size")) is not None:
        if type(size) is not int or not 0 <= size <= binary_bytes:
            raise RefusedError(f"{shown(name)} has a binary_data_size that the body does not have")
        check_binary(name, tensor.get("datatype"), shape, size)
        return size
    data = tensor.get("data")
    check_values(name, shape, _count_values(data) if isinstance(data, list) else 0)
    return 0


def _count_values(data: Sequence[Any]) -> int:
    """Count what is in a list and in the lists of it; the depth was checked before."""
    if list not in set(map(type, data)):
        return len(data)
    return sum(_count_values(each) if isinstance(each, list) else 1 for each in data)
