"""HTTP/2 frames (RFC 9113): only what a relay needs that looks into the messages of gRPC. Standard library only."""

from __future__ import annotations

import struct
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
ACK = END_STREAM = 1
END_HEADERS, PADDED, PRIORITY = 4, 8, 32
FIRST_WINDOW, FIRST_FRAME_BYTES = 65_535, 16_384
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, COMPRESSION_ERROR, CALM_DOWN = 0, 1, 3, 6, 9, 11
_INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 4, 5
HEAD_BYTES = 9
"""Of each frame, before its payload."""
_read_head = struct.Struct(">BHBBI").unpack_from
_SETTING_BYTES = 6
_PRIORITY_BYTES = 5
Frame = tuple[int, int, int, int, int]
"""Type, flags, stream; where in the bytes its payload begins and ends. The frame itself begins 9 bytes before."""


class BrokenConnectionError(Exception):
    """A peer breaks the protocol; the connection ends.

    Args:
        code: of HTTP/2.
        problem: for the log and the peer.
    """

    def __init__(self, code: int, problem: str) -> None:
        super().__init__(problem)
        self.code, self.problem = code, problem


def split(data: bytes | bytearray, position: int, most_bytes: int) -> Iterator[Frame]:
    """Yield the whole frames from a position on; BrokenConnectionError: one is longer than allowed."""
    end = len(data)
    while end - position >= HEAD_BYTES:
        high, low, kind, flags, stream = _read_head(data, position)
        size = high << 16 | low
        if size > most_bytes:
            raise BrokenConnectionError(FRAME_SIZE_ERROR, f"a frame has {size} bytes")
        begin = position + HEAD_BYTES
        position = begin + size
        if position > end:
            return
        yield kind, flags, stream & 0x7FFFFFFF, begin, position


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    """Make a frame."""
    return b"".join((len(payload).to_bytes(3, "big"), bytes((kind, flags)), stream.to_bytes(4, "big"), payload))


def window_update(stream: int, count: int) -> bytes:
    """Return the frame that lets the peer send that number of bytes more; stream 0 is the connection."""
    return b"\0\0\4\x08\0" + stream.to_bytes(4, "big") + count.to_bytes(4, "big")


def goaway(code: int, last_stream: int, problem: str) -> bytes:
    """Return the frame that says why the connection ends, and which call of the client was the last."""
    return frame(GOAWAY, 0, 0, last_stream.to_bytes(4, "big") + code.to_bytes(4, "big") + problem.encode())


def unpadded(flags: int, payload: memoryview) -> memoryview:
    """Return the payload of a DATA frame without its padding."""
    if not flags & PADDED:
        return payload
    if not len(payload) or payload[0] >= len(payload):
        raise BrokenConnectionError(PROTOCOL_ERROR, "a frame has more padding than bytes")
    return payload[1 : len(payload) - payload[0]]


def block_of(kind: int, flags: int, payload: memoryview) -> bytes:
    """Return the part of a block of headers that is in a HEADERS or CONTINUATION frame."""
    if kind == HEADERS:
        payload = unpadded(flags, payload)
        if flags & PRIORITY:
            payload = payload[_PRIORITY_BYTES:]
    return bytes(payload)


def limits_of(settings: memoryview) -> tuple[int | None, int | None]:
    """Read the first window of a stream and the largest frame out of a SETTINGS frame; None: they stay."""
    window = largest = None
    for at in range(0, len(settings) - _SETTING_BYTES + 1, _SETTING_BYTES):
        name, value = int.from_bytes(settings[at : at + 2], "big"), int.from_bytes(settings[at + 2 : at + 6], "big")
        if name == _INITIAL_WINDOW_SIZE:
            window = value
        elif name == _MAX_FRAME_SIZE:
            largest = value
    return window, largest
