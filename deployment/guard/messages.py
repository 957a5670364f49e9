"""Messages of Triton's gRPC door: one that asks for inference is compared with what it carries.

No method is needed for that: of all messages that Triton takes, ModelInferRequest alone has the fields 5 to 7.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import ModelInferRequest

from deployment.guard.known_fields import SHARED_MEMORY, fits
from deployment.guard.limits import (
    HEADER_BYTES,
    RefusedError,
    check_binary,
    check_count,
    check_values,
    count_elements,
    shown,
)

_INPUTS, _OUTPUTS, _RAW = 5, 6, 7
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_FIELDS = 4096
_LONGEST_TEXT = 400
_KEPT_TEXT = 128
_SHARED_MEMORY_NAME = SHARED_MEMORY.encode()


@dataclass(frozen=True)
class Parts:
    """A message that asks for inference.

    Attributes:
        rest: all but the raw tensors.
        raw_sizes: bytes of each raw tensor.
    """

    rest: bytes
    raw_sizes: list[int]


def check_request(parts: Parts) -> None:
    """Check a request for inference; RefusedError: it is malformed, or an input does not fit its shape."""
    try:
        request = ModelInferRequest.FromString(parts.rest)
    except DecodeError:
        raise RefusedError("the message is no ModelInferRequest") from None
    _check_tensors(request, parts.raw_sizes, _SHARED_MEMORY_NAME in parts.rest)


def check_short(message: memoryview) -> bool:
    """Check a message of a few kilobytes at once; False: it has to be taken apart."""
    content = message.tobytes()
    if fits(content, 0):
        return True
    try:
        request = ModelInferRequest.FromString(content)
    except DecodeError:
        return False  # the message of another method, perhaps
    _check_tensors(request, list(map(len, request.raw_input_contents)), _SHARED_MEMORY_NAME in content)
    return True


def _check_tensors(request: Any, raw_sizes: list[int], may_share: bool) -> None:
    """Check the tensors; ``may_share``: whether the message has the name of a parameter for shared memory anywhere."""
    check_count("outputs", len(request.outputs))
    inputs = request.inputs
    check_count("inputs", len(inputs))
    used = 0
    for tensor in inputs:
        if may_share and SHARED_MEMORY in tensor.parameters:
            count_elements(tensor.name, tensor.shape)
        elif not raw_sizes:
            _check_contents(tensor)
        elif not tensor.HasField("contents"):  # both: Triton says that one is too many
            if used < len(raw_sizes):  # and that one is missing
                check_binary(tensor.name, tensor.datatype, tensor.shape, raw_sizes[used])
            used += 1
    if used < len(raw_sizes):
        raise RefusedError("raw_input_contents has more entries than the request has inputs for them")


def refusal(message: memoryview, problem: str) -> bytes:
    """Make a message that Triton refuses in place of one that it shall not see: INVALID_ARGUMENT, with the reason.

    A version that is no number is what Triton looks at first, and quotes.
    """
    answer = ModelInferRequest(model_version=f"refused: {problem}"[:_LONGEST_TEXT])
    for field, name in ((1, "model_name"), (3, "id")):
        if text := _text_of(message, field):
            setattr(answer, name, text)
    content: bytes = answer.SerializeToString()
    return content


def decompress(message: memoryview, most: int) -> bytes:
    """Decompress what gRPC has compressed, by gzip or deflate; RefusedError: it is broken, or larger than allowed."""
    try:
        stream = zlib.decompressobj(zlib.MAX_WBITS | 32)  # the data's own header says which of both it is
        content = stream.decompress(message, most + 1)
    except zlib.error:
        raise RefusedError("the message cannot be decompressed") from None
    if len(content) > most:
        raise RefusedError(f"the message is larger than {most} bytes when it is decompressed", 413)
    if not stream.eof or stream.unused_data:
        raise RefusedError("the message cannot be decompressed")
    return content


def take_apart(message: memoryview) -> Parts | None:
    """Leave out the raw tensors; None: the message has no field that only a request for inference has.

    Raises:
        RefusedError: it is malformed, or so large without the raw tensors that it is not looked at.
    """
    position, end, count, kept = 0, len(message), 0, 0
    parts: list[memoryview] = []
    raw_sizes: list[int] = []
    asks = False
    while position < end:
        begin = position
        tag, position = _varint(message, position)
        number, kind = tag >> 3, tag & 7
        if kind == _BYTES:
            size, position = _varint(message, position)
            position += size
        elif kind == _VARINT:
            _, position = _varint(message, position)
        elif kind in (_FIXED32, _FIXED64):
            position += 4 if kind == _FIXED32 else 8
        else:
            raise RefusedError("the message is malformed")
        count += 1
        if position > end or not number or count > _MOST_FIELDS:
            raise RefusedError("the message is malformed, or has more fields than any request needs")
        asks = asks or _INPUTS <= number <= _RAW
        if number == _RAW and kind == _BYTES:
            parts.append(message[kept:begin])
            raw_sizes.append(size)
            kept = position
    parts.append(message[kept:])
    if not asks:
        return None
    if (size := sum(map(len, parts))) > HEADER_BYTES:
        raise RefusedError(f"the request has {size} bytes beside raw_input_contents; at most {HEADER_BYTES} are taken")
    return Parts(b"".join(parts), raw_sizes)


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    try:
        while (byte := message[position]) >= 128:
            value |= (byte & 127) << shift
            shift += 7
            position += 1
            if shift > 63:
                raise RefusedError("the message is malformed")
    except IndexError:
        raise RefusedError("the message is malformed") from None
    return value | byte << shift, position + 1


def _check_contents(tensor: Any) -> None:
    """Check an input that has its values in the message."""
    filled = tensor.contents.ListFields()
    if len(filled) > 1:
        raise RefusedError(f"{shown(tensor.name)} has values of {len(filled)} types")
    check_values(tensor.name, tensor.shape, len(filled[0][1]) if filled else 0)


def _text_of(message: memoryview, field: int) -> str:
    """Find a short text among the first fields of a message; empty where there is none, or none can be read."""
    position, count = 0, 0
    try:
        while position < len(message) and count < _MOST_FIELDS:
            tag, position = _varint(message, position)
            if tag & 7 != _BYTES:
                return ""
            size, position = _varint(message, position)
            if tag >> 3 == field:
                return str(message[position : position + min(size, _KEPT_TEXT)], "utf-8", "replace")
            position, count = position + size, count + 1
    except RefusedError:
        pass
    return ""
