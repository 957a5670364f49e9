"""Short requests for inference, checked field by field: each is looked up among those that were parsed before.

A request often comes after a pause, in which what parses it has left the processor's caches; parsed as a whole it then
takes ten times as long as the next one would.
"""

from __future__ import annotations

from operator import contains

from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import ModelInferRequest

from deployment.guard.limits import RefusedError, binary_bytes

SHORT_MESSAGE = 8 << 10
SHARED_MEMORY = "shared_memory_region"
"""The parameter by which an input has no bytes in the message."""

_MOST_FIELDS, _LONGEST_FIELD, _MOST_KNOWN = 64, 512, 2048
_ID, _INPUT, _RAW = (number << 3 | 2 for number in (3, 5, 7))
_OTHERS = frozenset(number << 3 | 2 for number in (1, 2, 4, 6))
_NONE_FITS, _NO_INPUT = range(0), range(1)
_known: dict[bytes, range] = {}


def fits(message: bytes, position: int) -> bool:
    """Whether a request whose raw tensors fit its inputs begins there, at most SHORT_MESSAGE bytes from the end.

    False: it has to be parsed to say. What this calls and touches is little on purpose.
    """
    inputs: list[range] = []
    raw_sizes: list[int] = []
    try:
        for _ in range(_MOST_FIELDS):
            begin = position
            tag, size = message[position], message[position + 1]
            position += 2
            if size >= 0x80:
                size += (message[position] - 1) << 7  # where a third byte belongs to it, it is more than there is
                position += 1
            position += size
            if tag == _RAW:
                raw_sizes.append(size)
            elif tag == _ID:  # often another one each time
                str(message[position - size : position], "utf-8")
            elif (tag == _INPUT or tag in _OTHERS) and size <= _LONGEST_FIELD:
                field = message[begin:position]
                taken = _known.get(field)
                if taken is None:
                    taken = _learn(field)
                if taken is not _NO_INPUT:
                    inputs.append(taken)
            else:
                return False
            if position >= len(message):
                break
    except (IndexError, UnicodeDecodeError):
        return False
    is_whole = position == len(message) and len(inputs) == len(raw_sizes) > 0
    return is_whole and all(map(contains, inputs, raw_sizes))


def _learn(field: bytes) -> range:
    """Parse one field, and keep how many raw bytes an input takes, of a size that may be any of the range's."""
    taken = _NO_INPUT
    try:
        for tensor in ModelInferRequest.FromString(field).inputs:
            taken = binary_bytes(tensor.name, tensor.datatype, tensor.shape)
            if tensor.HasField("contents") or SHARED_MEMORY in tensor.parameters:
                taken = _NONE_FITS
    except (DecodeError, RefusedError):
        taken = _NONE_FITS
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[field] = taken
    return taken
