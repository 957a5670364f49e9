"""Heads of HTTP/1: requests are read strictly, so that Triton cannot read another one than was checked here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from deployment.guard.limits import RefusedError

LONGEST_HEAD = 64 << 10
_MOST_HEADERS = 256
_REQUEST = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*((?:[!-~\x80-\xff][\t -~\x80-\xff]*)?)")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3})")
# What is only for the next hop, or stated again because the body is forwarded with its length.
_OWN = frozenset(
    {b"content-length", b"transfer-encoding", b"expect", b"te", b"trailer", b"upgrade", b"proxy-connection"}
)
_SINGLE = _OWN | {b"content-encoding", b"inference-header-content-length", b"host"}
_INFER = re.compile(
    rb"/v2/models/(?:[\w.~!$&'()*+,;=:@-]|%(?!2F|3F|25|[01])[0-9A-Fa-f]{2})+(?:/versions/[0-9]+)?/infer"
)
_BODILESS = (204, 304)


@dataclass(frozen=True)
class RequestHead:
    """The head of a request.

    Attributes:
        method, target: of its first line.
        minor: 0 or 1, of the version.
        headers: that are forwarded, each as a line.
        values: of the headers that may be there once, by their names in small letters.
    """

    method: bytes
    target: bytes
    minor: bytes
    headers: list[bytes]
    values: dict[bytes, bytes]

    @classmethod
    def parse(cls, head: bytes) -> RequestHead:
        """Read a head, without the empty line; RefusedError: it is not what HTTP/1.1 says, or says something twice."""
        first, *lines = head.split(b"\r\n")
        request = _REQUEST.fullmatch(first)
        if request is None or len(lines) > _MOST_HEADERS:
            raise RefusedError("the request's head is malformed")
        headers, values = [], {}
        for line in lines:
            header = _HEADER.fullmatch(line)
            if header is None:
                raise RefusedError("the request has a malformed header")
            name = header[1].lower()
            if name in _SINGLE:
                if name in values:
                    raise RefusedError(f"the request has two headers {name.decode()}")
                values[name] = header[2].rstrip()
            if name not in _OWN:
                headers.append(line)
        return cls(request[1], request[2], request[3], headers, values)

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks; RefusedError: by another coding, or with a length too."""
        coding = self.values.get(b"transfer-encoding")
        if coding is None:
            return False
        if coding.lower() != b"chunked" or b"content-length" in self.values or self.minor == b"0":
            raise RefusedError("the request's body has another transfer coding than chunked, or a length too", 501)
        return True

    @property
    def body_bytes(self) -> int:
        """Length of a body that does not come in chunks."""
        return self._length(b"content-length") or 0

    @property
    def json_bytes(self) -> int | None:
        """Length of the JSON before binary tensors, where this is a request that may have such; else None."""
        return self._length(b"inference-header-content-length") if self.is_inference else None

    @cached_property
    def is_inference(self) -> bool:
        """Whether Triton takes it for inference, whose body may be compressed, and end in binary tensors."""
        return _INFER.fullmatch(self.target.partition(b"?")[0]) is not None

    @property
    def is_plain(self) -> bool:
        """Whether the body, if there is one, is JSON alone as it is sent, and sent at once."""
        is_sent_at_once = not self.is_chunked and b"expect" not in self.values
        return is_sent_at_once and not self.encoding and self.json_bytes is None

    @property
    def encoding(self) -> bytes:
        """How the body is compressed; empty where it is not."""
        given = self.values.get(b"content-encoding", b"")
        return b"" if given == b"identity" else given

    def _length(self, name: bytes) -> int | None:
        given = self.values.get(name)
        if given is None:
            return None
        if not _LENGTH.fullmatch(given):
            raise RefusedError(f"{name.decode()} is no length")
        return int(given)

    def forwarded(self, body_bytes: int, is_decompressed: bool) -> bytes:
        """Write the head for Triton.

        Args:
            body_bytes: of the body that follows.
            is_decompressed: the body was decompressed here.
        """
        lines = [b"%s %s HTTP/1.%s" % (self.method, self.target, self.minor)]
        lines += [
            line for line in self.headers if not is_decompressed or not line.lower().startswith(b"content-encoding:")
        ]
        if body_bytes or self.method not in (b"GET", b"HEAD"):
            lines.append(b"Content-Length: %d" % body_bytes)
        return b"\r\n".join((*lines, b"", b""))


class ResponseEnd:
    """Finds where responses end in what Triton sends; the bytes themselves are for the client as they are."""

    def __init__(self) -> None:
        self._rest = b""
        self._left: int | None = None
        self._is_chunked = False
        self._method = b""
        self.is_over = True

    def expect(self, method: bytes) -> None:
        """Wait for the response to a request."""
        self._method, self._rest, self._left, self._is_chunked, self.is_over = method, b"", None, False, False

    def feed(self, data: bytes) -> None:
        """Take what has come; ``is_over`` then says whether the response is whole. ValueError: it is none."""
        data, self._rest = self._rest + data, b""
        if self._left is None and not self._is_chunked:
            head, separator, data = data.partition(b"\r\n\r\n")
            if not separator:
                self._rest = head
                return
            self._begin(head)
            if self._left is None and not self._is_chunked:  # it was no final response
                self.feed(data)
                return
        if self._is_chunked:
            self._feed_chunks(data)
        else:
            self._left = (self._left or 0) - len(data)
            self.is_over = self._left <= 0

    def _begin(self, head: bytes) -> None:
        status = _STATUS.match(head)
        if status is None:
            raise ValueError("no response")
        code = int(status[1])
        if code < 200:
            return
        fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:])
        if self._method == b"HEAD" or code in _BODILESS:
            self._left = 0
        elif fields.get(b"transfer-encoding", b"").strip() == b"chunked":
            self._is_chunked = True
        else:
            self._left = int(fields.get(b"content-length", b"9223372036854775807"))  # or until it hangs up

    def _feed_chunks(self, data: bytes) -> None:
        position = 0
        if self._left:
            position = min(self._left, len(data))
            self._left -= position
        while not self._left:
            end = data.find(b"\r\n", position)
            if end < 0:
                self._rest = data[position:]
                return
            size = int(data[position:end].partition(b";")[0], 16)
            if not size:
                # After the last chunk there may be trailers; what ends is an empty line.
                self.is_over = data.find(b"\r\n\r\n", end) >= 0
                self._rest = b"" if self.is_over else data[position:]
                return
            whole = end + 2 + size + 2
            self._left = max(0, whole - len(data))
            position = min(whole, len(data))
