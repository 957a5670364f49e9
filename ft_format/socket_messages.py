"""The messages of the socket between the OpenAI endpoint and the engine's process.

The engine's side sends HANDSHAKE. Then both send frames: the bytes of the body (uint32), the kind (uint8), the number
of the request (uint32, chosen by the endpoint, new on its connection), and the body. Everything is little-endian.

| kind | from | body |
| --- | --- | --- |
| REQUEST | endpoint | fields and arrays, see ``pack``; the fields are those of ``Asked`` |
| CANCEL | endpoint | empty |
| ADAPTERS | endpoint | fields: ``action``, and what it is done to; see ``AdapterWish`` |
| TOKENS, LAST_TOKENS | engine | uint32 token ids that the answer before did not have |
| ARRAYS, LAST_ARRAYS | engine | fields, empty, and the arrays that were asked for, with all tokens so far |
| ADAPTERS | engine | fields: ``adapters``, those that requests may name now: by name ``path`` and ``rank`` |
| FAILURE | engine | fields: ``problem`` and ``code``, a name of pb_utils.TritonError, or CLOSING |

``LAST_...``, ADAPTERS and FAILURE end the answer.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DIRECTORY_VARIABLE = "SLIPWAY_DIRECT_DIRECTORY"
"""Environment variable of the server: the directory of the sockets, which its owner alone may enter."""
HANDSHAKE = b"slipway direct 3\n"
CLOSING = "CLOSING"
"""Code of the failure of a request that came when the model was being unloaded: ask again, through Triton."""
_HEAD = struct.Struct("<IBI")
_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 30
_BYTES = "bytes"
_NUMBERS = "biuf"
_UNREADABLE = (
    *(struct.error, ValueError, TypeError, LookupError, OverflowError),
    *(AttributeError, RecursionError, MemoryError),
)
_JSON = json.JSONEncoder(separators=(",", ":"))


class Kind(IntEnum):
    """What a frame is; see the module."""

    REQUEST = 1
    CANCEL = 2
    TOKENS = 3
    LAST_TOKENS = 4
    ARRAYS = 5
    LAST_ARRAYS = 6
    FAILURE = 7
    ADAPTERS = 8


class Scalar(NamedTuple):
    """A tensor of one number, [1, 1]: most of a request's; as a part of the fields it costs a tenth of an array.

    Attributes:
        value: a number, or true or false.
        kind: numpy's name of its type.
    """

    value: float
    kind: str

    def to_array(self) -> Array:
        """Return it as an array."""
        return np.array(self.value, self.kind, ndmin=2)


class MessageError(ValueError):
    """The other side does not send what it should; the connection is of no more use."""


class Frame(NamedTuple):
    """One message."""

    kind: int
    number: int
    body: bytes


@dataclass(frozen=True)
class Asked:
    """What a request says beside its tensors.

    Attributes:
        name: the client's name of the request, for the log.
        outputs: names of the tensors that are to be answered.
        shown: tokens that the client has already: it wants those behind them, as TOKENS; None: it wants arrays.
        is_streamed: whether tokens are sent when they are made; else there is one answer, with all of them.
        arrived_ns: of time.monotonic_ns, when the client's request was there.
    """

    name: str
    outputs: Sequence[str]
    shown: int | None
    is_streamed: bool
    arrived_ns: int

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Asked:
        """Take the fields of a REQUEST; MessageError: they are not what a request says."""
        if set(fields) != set(_ASKED) or not all(isinstance(fields[name], kinds) for name, kinds in _ASKED.items()):
            raise MessageError(f"a request's fields are {', '.join(map(str, fields))}")
        if not all(isinstance(name, str) for name in fields["outputs"]):
            raise MessageError("a request's outputs are no names")
        return cls(**fields)

    def pack(self, tensors: Mapping[str, Array | Scalar]) -> bytes:
        """Return the body of the REQUEST."""
        return pack(vars(self), tensors)


@dataclass(frozen=True)
class AdapterWish:
    """What the endpoint wants of a model's adapters.

    Attributes:
        action: LIST, LOAD or UNLOAD.
        name: of the adapter; LIST has none.
        path: of its directory; LOAD alone has one.
    """

    action: str
    name: str = ""
    path: str = ""

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> AdapterWish:
        """Take the fields of an endpoint's ADAPTERS; MessageError: they are not what it wants."""
        wanted = _WISHES.get(str(fields.get("action")))
        if wanted is None or set(fields) != wanted or not all(isinstance(each, str) for each in fields.values()):
            raise MessageError(f"what is wanted of adapters is {', '.join(map(str, fields))}")
        return cls(**fields)

    def pack(self) -> bytes:
        """Return the body of the ADAPTERS."""
        return pack({name: getattr(self, name) for name in sorted(_WISHES[self.action])}, {})


LIST, LOAD, UNLOAD = "list", "load", "unload"
_WISHES = {LIST: {"action"}, LOAD: {"action", "name", "path"}, UNLOAD: {"action", "name"}}
_ASKED: Mapping[str, Any] = {
    "name": str,
    "outputs": list,
    "shown": int | None,
    "is_streamed": bool,
    "arrived_ns": int,
}


def socket_name(model: str, version: str, instance: str) -> str:
    """Return the name of the socket of an instance of a model's version."""
    return f"{model}.{version}.{instance}.sock"


def frame(kind: Kind, number: int, body: bytes = b"") -> bytes:
    """Return a message as it is sent."""
    return _HEAD.pack(len(body), kind, number) + body


class Frames:
    """Cuts what comes from a socket into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that are complete with these bytes; MessageError: one is longer than any may be."""
        self._data += data
        start = 0
        while len(self._data) - start >= _HEAD.size:
            length, kind, number = _HEAD.unpack_from(self._data, start)
            if length > _LONGEST:
                raise MessageError(f"a frame of {length} bytes")
            end = start + _HEAD.size + length
            if len(self._data) < end:
                break
            yield Frame(kind, number, bytes(self._data[start + _HEAD.size : end]))
            start = end
        del self._data[:start]


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Return the body of TOKENS and LAST_TOKENS."""
    return struct.pack(f"<{len(ids)}I", *ids)


def unpack_tokens(body: bytes) -> tuple[int, ...]:
    """Return the token ids of a body; MessageError: it has none."""
    try:
        return struct.unpack(f"<{len(body) // _LENGTH.size}I", body)
    except struct.error as error:
        raise MessageError(f"tokens cannot be read: {error}") from error


def pack(fields: Mapping[str, Any], arrays: Mapping[str, Array | Scalar]) -> bytes:
    """Return a body: the length of a JSON object (uint32), the object, and the arrays' contents one after another.

    The object has the fields, and ``arrays``: name, numpy's name of the type, and shape of each. An array of ``bytes``
    has the type "bytes"; its elements follow their lengths (uint32). A Scalar has its value in place of the shape.
    """
    index, contents = list[tuple[str, str, Any]](), list[bytes]()
    for name, array in arrays.items():
        if isinstance(array, Scalar):
            index.append((name, array.kind, array.value))
            continue
        is_bytes = array.dtype.hasobject
        index.append((name, _BYTES if is_bytes else array.dtype.str, array.shape))
        contents += [_LENGTH.pack(len(each)) + each for each in array.flat] if is_bytes else [array.tobytes()]
    head = _JSON.encode({**fields, "arrays": index}).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *contents))


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the fields and arrays of a body.

    Raises:
        MessageError: it is not what ``pack`` returns.
    """
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        fields = json.loads(body[_LENGTH.size : end])
        arrays = dict[str, Array]()
        for name, kind, shape in fields.pop("arrays"):
            if kind == _BYTES:
                arrays[name], end = _elements(body, end, shape)
                continue
            dtype = np.dtype(kind)
            if dtype.kind not in _NUMBERS:
                raise MessageError(f"{name} has type {kind}")
            if not isinstance(shape, list):
                arrays[name] = Scalar(shape, kind).to_array()
                continue
            if (count := math.prod(shape)) < 0:
                raise MessageError(f"{name} has shape {shape}")
            arrays[name] = (
                np.frombuffer(body, dtype, count, end).reshape(shape).copy() if count else np.zeros(shape, dtype)
            )
            end += count * dtype.itemsize
    except _UNREADABLE as error:
        raise MessageError(f"fields and arrays cannot be read: {error!r}") from error
    return fields, arrays


def _elements(body: bytes, start: int, shape: Sequence[int]) -> tuple[Array, int]:
    """Read an array of bytes; returns where it ends too."""
    if math.prod(shape) > (len(body) - start) // _LENGTH.size or min(shape, default=0) < 0:
        raise MessageError("an array has more elements than its content")
    found = np.empty(shape, object)
    for place in np.ndindex(*shape):
        (length,) = _LENGTH.unpack_from(body, start)
        start += _LENGTH.size
        if start + length > len(body):
            raise MessageError("an element is cut off")
        found[place] = body[start : start + length]
        start += length
    return found, start
