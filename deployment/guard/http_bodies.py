"""Bodies of HTTP/1 requests: received with limits, and checked."""

from __future__ import annotations

import re
from functools import partial

from deployment.guard.checks import SHORT_BYTES, Checks
from deployment.guard.http_heads import RequestHead
from deployment.guard.json_bodies import check_json, check_json_length
from deployment.guard.limits import Memory, RefusedError
from deployment.guard.messages import decompress

_MOST_CHUNKS = 65_536
_LONGEST_LINE = 4096
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[\t -~\x80-\xff]*)?\r\n")
_COMPRESSED = (b"gzip", b"deflate")


class Body:
    """A body while it comes in.

    Raises:
        RefusedError: it is too long.
    """

    def __init__(self, head: RequestHead, most_bytes: int, memory: Memory) -> None:
        self.content: bytes | bytearray = bytearray()
        self.is_decompressed = False
        self._is_chunked = head.is_chunked
        self._most, self._memory, self._taken = most_bytes, memory, 0
        self._left = 0 if self._is_chunked else head.body_bytes
        self._chunks = 0
        self._is_last = False  # chunk, of length 0; trailers follow
        self.is_whole = not self._is_chunked and not self._left
        self._check_length(self._left)

    def receive(self, data: bytearray) -> None:
        """Take bytes from the front of what a client has sent."""
        if not self._is_chunked:
            self._take(data)
            self.is_whole = not self._left
            return
        assert isinstance(self.content, bytearray)
        position = 0
        while not self.is_whole:
            if self._left:  # of a chunk and the end of its line
                part = data[position : position + self._left]
                position += len(part)
                self._left -= len(part)
                self._keep(part)
                if self._left:
                    break
                if self.content[-2:] != b"\r\n":
                    raise RefusedError("the request's body has a malformed chunk")
                del self.content[-2:]
                continue
            end = self._read_line(data, position)
            if end is None:
                break
            position = end
        del data[:position]

    def _take(self, data: bytearray) -> None:
        if len(data) <= self._left:
            self._keep(data)
            self._left -= len(data)
            data.clear()
        else:
            self._keep(data[: self._left])
            del data[: self._left]
            self._left = 0

    def _keep(self, part: bytes | bytearray) -> None:
        self._take_memory(len(part))
        self.content += part

    def _take_memory(self, count: int) -> None:
        if not self._memory.take(count):
            raise RefusedError("the server holds too many large requests; try again", 503)
        self._taken += count

    def _read_line(self, data: bytearray, position: int) -> int | None:
        """Read the line before a chunk, or a trailer; None: it is not there as a whole."""
        end = data.find(b"\r\n", position)
        if end < 0:
            if len(data) - position > _LONGEST_LINE:
                raise RefusedError("the request's body has a malformed chunk")
            return None
        end += 2
        if self._is_last:
            self.is_whole = end == position + 2
            self._count()
            return end
        chunk = _CHUNK.fullmatch(data, position, end)
        if chunk is None:
            raise RefusedError("the request's body has a malformed chunk")
        size = int(chunk[1], 16)
        self._count()
        self._check_length(len(self.content) + size)
        self._is_last = not size
        self._left = size + 2 if size else 0
        return end

    def _count(self) -> None:
        self._chunks += 1
        if self._chunks > _MOST_CHUNKS:
            raise RefusedError(f"the request's body has more than {_MOST_CHUNKS} chunks")

    def _check_length(self, size: int) -> None:
        if size > self._most:
            raise RefusedError(
                f"the request's body has more than {self._most} bytes (deployment.guard_max_body_bytes)", 413
            )

    def drop(self) -> None:
        """Release the bytes."""
        self._memory.give_back(self._taken)
        self._taken = 0
        self.content = bytearray()

    def is_checked_at_once(self, head: RequestHead) -> bool:
        """Whether the check is short; RefusedError: what the head says of the body is wrong."""
        return not head.encoding and self._json_bytes(head, len(self.content)) <= SHORT_BYTES

    def check(self, head: RequestHead) -> None:
        """Check a body that is not compressed; RefusedError: Triton shall not see it."""
        size = self._json_bytes(head, len(self.content))
        if size:
            check_json(bytes(self.content[:size]), len(self.content) - size)

    async def check_slowly(self, head: RequestHead, checks: Checks) -> None:
        """Decompress a body where that is needed, and check it."""
        if head.encoding and not head.is_inference:
            raise RefusedError("Unsupported content-encoding, only 'identity' is supported.")
        if head.encoding and head.encoding not in _COMPRESSED:
            self.drop()  # Triton refuses it by the header
            return
        if head.encoding:
            work = partial(decompress, memoryview(bytes(self.content)), self._most)
            content = await checks.decompress(work)
            self.drop()
            self._take_memory(len(content))
            self.content, self.is_decompressed = content, True
        if size := self._json_bytes(head, len(self.content)):
            check_json_length(size)  # before it is copied
            await checks.parse(partial(check_json, bytes(self.content[:size]), len(self.content) - size))

    @staticmethod
    def _json_bytes(head: RequestHead, size: int) -> int:
        given = head.json_bytes
        if given is not None and given > size:
            raise RefusedError(f"inference-header-content-length is {given}, but the body has {size} bytes")
        return size if given is None else given
