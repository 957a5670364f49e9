"""What a client sends over one HTTP/2 connection: each message is held until it is whole and checked, then passed on.

The client's credit (flow control) is given here, for what has come in; Triton's is counted, for what may go out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from deployment.guard.frames import (
    CALM_DOWN,
    DATA,
    END_STREAM,
    FIRST_FRAME_BYTES,
    FIRST_WINDOW,
    BrokenConnectionError,
    frame,
    window_update,
)
from deployment.guard.limits import Memory

PREFIX_BYTES = 5
"""Before each message of gRPC: whether it is compressed, and its length."""


class Stream:
    """One call.

    Attributes:
        number: of the stream.
        window: bytes that Triton takes now.
        held, since: a message that is not yet whole, or is being checked; when it began.
        is_ended: the client has sent everything.
        is_refused: no message of it that asks for inference passes.
        is_checking: a long check is running; nothing of the stream passes before it is done.
        is_dropped: what else comes is not for Triton.
        unsent: bytes that Triton does not take yet.
        owed: bytes that the client has sent and has no new credit for.
    """

    __slots__ = (
        "number",
        "window",
        "held",
        "since",
        "is_refused",
        "is_ended",
        "is_checking",
        "is_dropped",
        "unsent",
        "owed",
        "has_sent_end",
    )

    def __init__(self, number: int, window: int) -> None:
        self.number, self.window = number, window
        self.held = bytearray()
        self.since = 0.0
        self.is_ended = self.is_refused = self.is_checking = self.is_dropped = self.has_sent_end = False
        self.unsent: deque[memoryview] = deque()
        self.owed = 0


class Streams:
    """The calls of one connection.

    Args:
        to_triton, to_client: take bytes.
        inspect: takes a stream and its next message with prefix; gives what to pass on, or None: it will say later.
        refuse: makes a message, with its prefix, that Triton refuses for a reason.
        memory: for what is held.
        most_bytes: of a message.
    """

    def __init__(
        self,
        to_triton: Callable[[bytes], None],
        to_client: Callable[[bytes], None],
        inspect: Callable[[Stream, memoryview], bytes | memoryview | None],
        refuse: Callable[[str], bytes],
        memory: Memory,
        most_bytes: int,
    ) -> None:
        self._to_triton, self._to_client, self._inspect, self._refuse = to_triton, to_client, inspect, refuse
        self._memory, self._most = memory, most_bytes
        self.by_number: dict[int, Stream] = {}
        self.first_window, self.frame_bytes = FIRST_WINDOW, FIRST_FRAME_BYTES
        self._window, self._owed = FIRST_WINDOW, 0

    def open(self, number: int) -> Stream:
        """Begin a call."""
        stream = self.by_number[number] = Stream(number, self.first_window)
        return stream

    def close(self, number: int) -> None:
        """End a call; what is held of it is gone."""
        stream = self.by_number.pop(number, None)
        if stream is not None:
            stream.is_dropped = True
            self._memory.give_back(len(stream.held) + sum(map(len, stream.unsent)))

    def coming(self) -> list[Stream]:
        """Return the calls of which a message is coming in."""
        return [each for each in self.by_number.values() if each.held and not each.is_checking]

    def close_all(self) -> None:
        """End all calls."""
        for number in list(self.by_number):
            self.close(number)

    def receive(self, number: int, size: int, payload: memoryview, is_end: bool) -> bool:
        """Take the payload of a DATA frame.

        Args:
            number: of the stream.
            size: of the frame's payload with its padding, which counts for credit.
            payload: without it.
            is_end: the client sends nothing more.

        Returns:
            Whether the frame goes on as it is; else what goes on was given to ``to_triton``, now or later.
        """
        self._owe(size)
        stream = self.by_number.get(number)
        if stream is None:
            return False  # it has ended at Triton already
        stream.is_ended = is_end
        stream.owed += size
        passes = False
        if not stream.is_dropped:
            if not self._memory.take(len(payload)):
                self._exceed(stream, "the server holds too many large requests; try again")
            elif stream.held or stream.is_checking:
                stream.held += payload
                self.pass_on(stream)
            else:
                passes = self._pass_whole(stream, size, payload)
        if stream.owed * 4 >= self.first_window:
            self._give_credit(stream)
        return passes

    def find_ready(self, number: int, size: int) -> Stream | None:
        """Return a call of which a whole message may go on in its frame, whose payload has this size."""
        stream = self.by_number.get(number)
        if stream is None or size > stream.window or size > self._window or size > self.frame_bytes:
            return None
        if stream.held or stream.unsent or stream.is_checking or stream.is_dropped or stream.is_refused:
            return None
        return stream

    def note_passed(self, stream: Stream, size: int, is_end: bool) -> None:
        """Count a frame that has gone on as ``find_ready`` allowed."""
        self._owe(size)
        stream.is_ended = is_end
        stream.owed += size
        self._spend(stream, size)
        self._give_credit(stream)

    def _owe(self, size: int) -> None:
        self._owed += size
        if self._owed >= FIRST_WINDOW // 2:
            self._to_client(window_update(0, self._owed))
            self._owed = 0

    def _spend(self, stream: Stream, size: int) -> None:
        self._window -= size
        stream.window -= size
        stream.has_sent_end = stream.has_sent_end or stream.is_ended

    def _pass_whole(self, stream: Stream, frame_bytes: int, payload: memoryview) -> bool:
        """Take a payload that begins with a message; says whether it is that message alone, and passes in its frame."""
        size = len(payload)
        if size >= PREFIX_BYTES and int.from_bytes(payload[1:PREFIX_BYTES], "big") == size - PREFIX_BYTES <= self._most:
            passed = self._inspect(stream, payload)
            if passed is not None:
                self._memory.give_back(size)
                if passed is payload and size == frame_bytes and not stream.unsent and self._has_room(stream, size):
                    self._spend(stream, size)
                    return True
                self._send(stream, passed, stream.is_ended)
                return False
        stream.held += payload
        stream.since = time.monotonic()
        if not stream.is_checking:
            self.pass_on(stream)
        return False

    def _has_room(self, stream: Stream, size: int) -> bool:
        """Whether Triton takes that many bytes of a stream now, in one frame."""
        return size <= self._window and size <= stream.window and size <= self.frame_bytes

    def pass_on(self, stream: Stream) -> None:
        """Pass on what is whole of the messages that are held."""
        while not stream.is_checking and not stream.is_dropped and len(stream.held) >= PREFIX_BYTES:
            size = int.from_bytes(stream.held[1:PREFIX_BYTES], "big")
            if size > self._most:
                self._exceed(stream, f"a message has more than {self._most} bytes (deployment.guard_max_body_bytes)")
                return
            if len(stream.held) < PREFIX_BYTES + size:
                break
            message = memoryview(bytes(memoryview(stream.held)[: PREFIX_BYTES + size]))
            passed = self._inspect(stream, message)
            if passed is not None:
                self.finish(stream, len(message), passed)
        if stream.is_ended and not stream.is_checking and not stream.is_dropped and not stream.has_sent_end:
            rest = bytes(stream.held)  # part of a message, with which Triton does nothing
            self._memory.give_back(len(rest))
            stream.held = bytearray()
            self._send(stream, rest, True)
        self._give_credit(stream)

    def finish(self, stream: Stream, message_bytes: int, passed: bytes | memoryview) -> None:
        """Pass on the first message that is held."""
        del stream.held[:message_bytes]
        stream.since = time.monotonic()
        self._memory.give_back(message_bytes)
        self._send(stream, passed, stream.is_ended and not stream.held)

    def _exceed(self, stream: Stream, problem: str) -> None:
        """Have Triton refuse a message that is not held, and take nothing more of its call."""
        self._memory.give_back(len(stream.held))
        stream.held = bytearray()
        self._send(stream, self._refuse(problem), True)
        stream.is_dropped = True

    def _send(self, stream: Stream, content: bytes | memoryview, is_end: bool) -> None:
        if is_end:
            stream.has_sent_end = True
        if not stream.unsent and self._has_room(stream, len(content)):
            self._window -= len(content)
            stream.window -= len(content)
            self._to_triton(frame(DATA, END_STREAM if is_end else 0, stream.number, content))
            return
        if len(content) and not self._memory.take(len(content)):
            raise BrokenConnectionError(CALM_DOWN, "the server holds too many large requests; try again")
        stream.unsent.append(memoryview(owned_bytes(content)))
        self._send_held(stream)

    def _send_held(self, stream: Stream) -> None:
        """Send of what has waited as much as Triton takes."""
        while stream.unsent:
            content = stream.unsent[0]
            size = min(len(content), max(0, self._window), max(0, stream.window), self.frame_bytes)
            if not size and len(content):
                return
            stream.unsent.popleft()
            if size < len(content):
                stream.unsent.appendleft(content[size:])
            self._window -= size
            stream.window -= size
            self._memory.give_back(size)
            is_end = stream.has_sent_end and not stream.unsent
            self._to_triton(frame(DATA, END_STREAM if is_end else 0, stream.number, content[:size]))
        self._give_credit(stream)

    def _give_credit(self, stream: Stream) -> None:
        """Allow more of a call whose bytes have gone on, or are part of a message that must get whole."""
        is_free = not (stream.unsent or stream.is_checking or stream.is_ended)
        if is_free and stream.owed * 4 >= self.first_window:
            self._to_client(window_update(stream.number, stream.owed))
            stream.owed = 0

    def add_window(self, number: int, count: int) -> None:
        """Note that Triton takes more."""
        if number == 0:
            self._window += count
            for stream in [each for each in self.by_number.values() if each.unsent]:
                self._send_held(stream)
        elif (opened := self.by_number.get(number)) is not None:
            opened.window += count
            self._send_held(opened)

    def set_first_window(self, size: int) -> None:
        """Note what Triton takes of each call at first; those that are open get or lose the difference."""
        for stream in self.by_number.values():
            stream.window += size - self.first_window
        self.first_window = size
        for stream in list(self.by_number.values()):
            self._send_held(stream)


def owned_bytes(content: bytes | memoryview) -> bytes:
    """Return bytes that keep nothing else in memory: the same, where a view is of all of them."""
    whole = content.obj if isinstance(content, memoryview) else content
    return whole if isinstance(whole, bytes) and len(whole) == len(content) else bytes(content)
