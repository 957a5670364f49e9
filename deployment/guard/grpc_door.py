"""The gRPC door: HTTP/2 frames pass between a client and Triton as they are; messages are checked before they pass.

Triton's answers are not looked into: statuses, trailers, streams, cancellations, pings and the time-outs of both sides
are theirs. A message that Triton shall not see is replaced by one that it refuses with INVALID_ARGUMENT and the reason,
so that the call goes on as after any other mistake of a client.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from functools import partial

from deployment.guard import frames
from deployment.guard.checks import SHORT_BYTES
from deployment.guard.doors import Client, Door, Triton, is_slow
from deployment.guard.events import Why
from deployment.guard.frames import BrokenConnectionError
from deployment.guard.headers import HeaderWatch
from deployment.guard.known_fields import SHORT_MESSAGE, fits
from deployment.guard.limits import RefusedError
from deployment.guard.messages import Parts, check_request, check_short, decompress, refusal, take_apart
from deployment.guard.pace import MESSAGE, PING, Pace
from deployment.guard.streams import PREFIX_BYTES, Stream, Streams, owned_bytes

_LONGEST_HEADERS, _MOST_CONTINUATIONS = 64 << 10, 64
_MOST_STREAMS = 10_000
_HEAD_BYTES, _END_STREAM = frames.HEAD_BYTES, frames.END_STREAM
_CREDIT, _CREDIT_BYTES = frames.window_update(0, 0)[:4], len(frames.window_update(0, 0))
_read_heads = struct.Struct(">IBIBI").unpack_from
_CLIENTS_WINDOW = 4 << 20
"""Credit of a connection, of which gRPC's clients have little at first."""


class GrpcClient(Client):
    """A connection to the gRPC door."""

    def __init__(self, door: Door) -> None:
        super().__init__(door)
        self._data = self._answer = b""
        self._has_preface = self._is_broken = False
        self._last_stream = 0
        self._headers_of, self._headers = 0, b""
        self._watch = HeaderWatch()
        self._answers_headers_of = 0
        self._for_client: list[bytes] = []
        self._for_triton: list[bytes | memoryview] = []
        self._offered: deque[tuple[int | None, int | None]] = deque()
        """Settings of Triton that the client has not acknowledged."""
        self._longest_frame = frames.FIRST_FRAME_BYTES
        self._streams = Streams(
            self._for_triton.append,
            self._for_client.append,
            self._inspect,
            lambda problem: self._refuse(memoryview(b""), RefusedError(problem)),
            door.memory,
            door.most_bytes,
        )
        self._checks: set[asyncio.Task[None]] = set()
        self._pace: Pace
        self._continuations, self._has_asked = 0, False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        super().connection_made(transport)
        self._pace = Pace(self.reading)

    def data_received(self, data: bytes) -> None:
        """Take what the client sends."""
        if self._is_broken or not self._data and self._pass_at_once(data):
            return
        try:
            self._data = self._data + data if self._data else data
            if self.triton is not None:
                self._take_frames()
                self._pace.keep()
            elif len(self._data) > _LONGEST_HEADERS:
                self.reading.pause(Why.AHEAD)
        except BrokenConnectionError as error:
            self._break(error)

    def _pass_at_once(self, data: bytes) -> bool:
        """Pass on a short message that comes alone, or after credit, before anything else is done about it.

        What this calls and touches is little on purpose: after a pause none of it is in the processor's caches.
        """
        at = 0
        while data[at : at + 4] == _CREDIT:
            at += _CREDIT_BYTES
        size = len(data) - at - _HEAD_BYTES
        if not PREFIX_BYTES < size <= SHORT_MESSAGE or self._headers_of or self.triton is None:
            return False
        size_and_kind, flags, number, is_compressed, message_bytes = _read_heads(data, at)
        if size_and_kind != size << 8 or is_compressed or message_bytes != size - PREFIX_BYTES or flags > _END_STREAM:
            return False  # nor is it a frame DATA, which is 0
        stream = self._streams.find_ready(number, size)
        if stream is None or not fits(data, at + _HEAD_BYTES + PREFIX_BYTES):
            return False
        self.triton.transport.write(data)
        self._has_asked = True
        self._streams.note_passed(stream, size, flags != 0)
        self._flush()
        self._pace.count += at // _CREDIT_BYTES + 1 + MESSAGE
        self._pace.keep()
        return True

    def connected(self, triton: Triton | None) -> None:
        """Begin to pass on; without Triton there is nothing to be had here."""
        if triton is None:
            self.close()
            return
        self.reading.resume(Why.AHEAD)
        try:
            self._take_frames()
            self._pace.keep()
        except BrokenConnectionError as error:
            self._break(error)

    def _take_frames(self) -> None:
        position = 0
        if not self._has_preface:
            if not self._is_preface_whole():
                return
            self._has_preface, position = True, len(frames.PREFACE)
        content, view = self._data, memoryview(self._data)
        kept = 0  # from there to the position all passes as it is
        for kind, flags, stream, begin, end in frames.split(content, position, self._longest_frame):
            if self._headers_of and (kind, stream) != (frames.CONTINUATION, self._headers_of):
                raise BrokenConnectionError(frames.PROTOCOL_ERROR, "headers are interrupted")
            position = end
            self._pace.count += 1
            if kind == frames.DATA:
                payload = frames.unpadded(flags, view[begin:end]) if flags & frames.PADDED else view[begin:end]
                count = len(self._for_triton)
                if not self._streams.receive(stream, end - begin, payload, bool(flags & frames.END_STREAM)):
                    self._for_triton.insert(count, view[kept : begin - 9])  # before what was given for the frame
                    kept = end
            elif kind == frames.SETTINGS and flags & frames.ACK:
                self._for_triton.append(view[kept:end])  # before what it allows
                kept = end
                self._take_acknowledgement()
            elif kind != frames.WINDOW_UPDATE:
                self._note_frame(kind, flags, stream, view[begin:end])
        if kept < position:
            self._for_triton.append(view[kept:position])
        self._keep_rest(content[position:], position > 0)
        self._flush()

    def _is_preface_whole(self) -> bool:
        if not frames.PREFACE.startswith(self._data[: len(frames.PREFACE)]):
            raise BrokenConnectionError(frames.PROTOCOL_ERROR, "the client does not speak HTTP/2")
        return len(self._data) >= len(frames.PREFACE)

    def _note_frame(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        if kind == frames.HEADERS or kind == frames.CONTINUATION:
            self._take_headers(kind, flags, stream, frames.block_of(kind, flags, payload))
        elif kind == frames.RST_STREAM:
            self._streams.close(stream)
        elif kind == frames.PING:
            self._pace.count += PING
        else:
            self._pace.add_headers(len(payload))
            self._pace.count += PING if kind == frames.SETTINGS else 0  # which Triton acknowledges

    def _take_acknowledgement(self) -> None:
        if not self._offered:
            raise BrokenConnectionError(frames.PROTOCOL_ERROR, "settings are acknowledged that were not sent")
        self._apply(*self._offered.popleft())

    def _keep_rest(self, rest: bytes, has_gone_on: bool) -> None:
        """Keep part of a frame, which must be whole in time; so must headers, however many frames they are in."""
        is_coming = bool(rest) or self._headers_of != 0
        if is_coming and (not self.is_coming or has_gone_on and not self._headers_of):
            self.since = time.monotonic()
        self._data, self.is_coming, self.come_bytes = rest, is_coming, len(rest)

    def _take_headers(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            if stream <= self._last_stream or not stream % 2:
                raise BrokenConnectionError(frames.PROTOCOL_ERROR, "a call has headers again, or an old number")
            if len(self._streams.by_number) >= _MOST_STREAMS:
                raise BrokenConnectionError(frames.CALM_DOWN, "the connection has too many calls")
            self._last_stream, self._headers, self._continuations, self.has_begun = stream, b"", 0, True
            self._streams.open(stream).is_ended = bool(flags & frames.END_STREAM)
        elif not self._headers_of:
            raise BrokenConnectionError(frames.PROTOCOL_ERROR, "headers go on that have not begun")
        self._headers += payload
        self._pace.add_headers(len(payload))
        self._continuations += 1
        if len(self._headers) > _LONGEST_HEADERS or self._continuations > _MOST_CONTINUATIONS:
            raise BrokenConnectionError(frames.CALM_DOWN, "a call has too many headers")
        self._headers_of = 0 if flags & frames.END_HEADERS else stream
        if self._headers_of or self.door.takes_grpc_errors:
            return
        asks_errors = self._watch.has_name(self._headers)
        if (opened := self._streams.by_number.get(stream)) is not None:
            opened.is_refused = asks_errors

    def _apply(self, window: int | None, largest: int | None) -> None:
        """Follow Triton's settings from when the client does."""
        if largest is not None:
            self._streams.frame_bytes = largest
        if window is not None:
            self._streams.set_first_window(window)

    def answered(self, data: bytes) -> None:
        """Pass Triton's frames on; the credit that it gives is for what is passed on from here."""
        size = len(data) - _HEAD_BYTES
        if not self._answer and size > 0 and data[:5] == (size << 16).to_bytes(5, "big"):  # one frame DATA of a call
            self.transport.write(data)
            return
        self._answer = self._answer + data if self._answer else data
        try:
            self._pass_answer()
        except BrokenConnectionError as error:
            self._break(error)

    def _pass_answer(self) -> None:
        content = self._answer
        begin_of_kept = position = 0
        kept: list[bytes] = []
        for kind, flags, stream, begin, end in frames.split(content, 0, 1 << 24):
            position = end
            if kind == frames.WINDOW_UPDATE:
                self._streams.add_window(stream, int.from_bytes(content[begin:end], "big") & 0x7FFFFFFF)
                kept.append(content[begin_of_kept : begin - 9])
                begin_of_kept = end
            elif kind != frames.DATA or flags & frames.END_STREAM:
                self._note_answer(kind, flags, stream, memoryview(content)[begin:end])
        if not begin_of_kept and position == len(content):
            self._answer = b""
            self.transport.write(content)
        else:
            kept.append(content[begin_of_kept:position])
            self._answer = content[position:]
            self.transport.write(b"".join(kept))
        self._flush()

    def _note_answer(self, kind: int, flags: int, stream: int, payload: memoryview) -> None:
        if kind == frames.HEADERS or kind == frames.CONTINUATION:
            self._answers_headers_of = 0 if flags & frames.END_HEADERS else stream
        if kind == frames.RST_STREAM or kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM:
            self.was_answered = True
            self._streams.close(stream)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            window, largest = frames.limits_of(payload)
            self._longest_frame = max(self._longest_frame, largest or 0)
            if not self._offered and self._last_stream == 0:
                self._for_client.append(frames.window_update(0, _CLIENTS_WINDOW))
            self._offered.append((window, largest))

    def _flush(self) -> None:
        if self._for_triton and self.triton is not None:
            given = self._for_triton
            self.triton.transport.write(given[0] if len(given) == 1 else b"".join(given))
            given.clear()
        if self._for_client and not self._answers_headers_of:  # nothing may stand between headers of one call
            self.transport.write(b"".join(self._for_client))
            self._for_client.clear()
        if self.is_idle == bool(self._streams.by_number):
            self.is_idle, self.since = not self.is_idle, time.monotonic()
            self._has_asked = self._has_asked and not self.is_idle

    @property
    def awaits_answer(self) -> bool:
        """Whether one of its calls has a message; others are answered by nothing."""
        return not self.is_idle and self._has_asked

    def is_late(self, now: float) -> bool:
        """Whether it was idle for long, or a frame or a message does not get whole; calls may last."""
        if any(is_slow(now - each.since, len(each.held)) for each in self._streams.coming()):
            return True
        return super().is_late(now)

    def _inspect(self, stream: Stream, message: memoryview) -> bytes | memoryview | None:
        self._pace.count += MESSAGE
        self._has_asked = True
        is_compressed = message[0] != 0
        content = message[PREFIX_BYTES:]
        if not content and not is_compressed:
            return message
        try:
            if stream.is_refused and (is_compressed or take_apart(content) is not None):
                raise RefusedError("metadata triton_grpc_error can end this version of the server: leave it out")
            if not is_compressed:
                if len(content) <= SHORT_MESSAGE and check_short(content):
                    return message
                parts = take_apart(content)
                if parts is None:
                    return message
                if len(parts.rest) <= SHORT_BYTES:
                    check_request(parts)
                    return message
            else:
                parts = None
            owned = memoryview(owned_bytes(message))
        except RefusedError as refused:
            return self._refuse(content, refused)
        stream.is_checking = True
        task = asyncio.ensure_future(self._check_slowly(stream, owned, parts))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)
        return None

    async def _check_slowly(self, stream: Stream, message: memoryview, parts: Parts | None) -> None:
        passed: bytes | memoryview = message
        content = message[PREFIX_BYTES:]
        checks = self.door.checks
        try:
            if parts is None:
                passed = await checks.decompress(partial(_decompress, content, self.door.most_bytes))
                content = memoryview(passed)[PREFIX_BYTES:]
                parts = take_apart(content)
            if parts is not None:
                await checks.parse(partial(check_request, parts))
        except RefusedError as refused:
            passed = self._refuse(content, refused)
        stream.is_checking = False
        if stream.is_dropped or self.transport.is_closing():
            return
        try:
            self._streams.finish(stream, len(message), passed)
            self._streams.pass_on(stream)
        except BrokenConnectionError as error:
            self._break(error)
            return
        self._flush()

    def _refuse(self, content: memoryview, refused: RefusedError) -> bytes:
        self.door.report(refused.problem)
        return _with_prefix(refusal(content, refused.problem))

    def give_up(self) -> None:
        """Tell the client why the connection ends."""
        code = frames.NO_ERROR if self.is_idle else frames.CALM_DOWN
        self._break(BrokenConnectionError(code, "the connection was idle, or a message took too long to come in"))

    def _break(self, error: BrokenConnectionError) -> None:
        if error.code != frames.NO_ERROR:
            self.door.report(error.problem)
        self._is_broken = True
        self._streams.close_all()
        if self._has_preface and not self._answers_headers_of:
            self.transport.write(frames.goaway(error.code, self._last_stream, error.problem))
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release what is held."""
        super().connection_lost(exc)
        self._streams.close_all()
        self._data = self._answer = self._headers = b""
        for task in self._checks:
            task.cancel()


def _decompress(content: memoryview, most_bytes: int) -> bytes:
    return _with_prefix(decompress(content, most_bytes))


def _with_prefix(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content
