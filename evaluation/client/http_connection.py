"""JSON over HTTP with one deadline a request: a connection that is kept, waits that are limited, errors that are named.

``http.client`` limits each read; a server that sends a byte now and then would be read forever. Here every read of an
answer, its headers included, gets what is left of the request's time. Redirects are not followed, because the key would
go to another address, and proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import io
import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from evaluation.client.deadline_reader import Clock, DeadlineReader
from evaluation.client.errors import RequestError, UnreachableError
from evaluation.client.http_wording import message, retry_after_s, summary
from handover.errors import shortened

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 60.0
_CONNECT_S = 60.0
_MOST_BYTES = 512 << 20
_PIECE_BYTES = 1 << 16
_REFUSED_KEY = (401, 403)
_BROKE = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError)  # a server that is there, but gave no answer
BUSY = (429, 503)
"""What a server answers that is there and takes nothing more for now."""
DATA, DONE = b"data:", b"[DONE]"
"""How a line of a server-sent event begins, and the last event of an answer."""


@dataclass(frozen=True)
class Answer:
    """An answer that has been read to its end."""

    status: int
    headers: http.client.HTTPMessage
    content: bytes


class HttpConnection:
    """One connection to a server, which belongs to one thread.

    Args:
        url: base URL, ``http(s)://host:port/path``; the paths of requests follow it.
        key: bearer key; empty for none.
        key_name: what a message calls the key, such as the environment variable that it comes from.
        timeout_s: limit of one request in seconds, with its repetitions.
        retries: how often a request is sent again after the connection was refused or broke before an answer began, or
            the server was busy (429 or 503); its Retry-After is obeyed as far as the time limit allows.

    Every request raises UnreachableError where no server answers or the key is refused, and RequestError where it was
    refused, failed, was cut off or exceeded the time limit.
    """

    def __init__(self, url: str, key: str = "", key_name: str = "", timeout_s: float = 600.0, retries: int = 3) -> None:
        self.url, self.timeout_s, self.retries = url, timeout_s, retries
        self._key, self._key_name, self._clock, parts = key, key_name, Clock(), urlsplit(url)
        self._path = parts.path
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", parts.port, timeout=min(timeout_s, _CONNECT_S))
        self._connection.response_class = self._open_answer  # type: ignore[assignment]  # it is called as a class is
        self._headers = {"Accept": "application/json", "User-Agent": "slipway"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send one request and return the JSON of its answer."""
        with self._send(method, path, body) as answer:
            content = self._read(answer)
        return self._json(Answer(answer.status, answer.headers, content))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        """Send one request and yield the JSON of each server-sent event as it arrives.

        The request is cancelled when the caller stops reading early: the connection is closed.
        """
        answer, is_complete = self._send("POST", path, body), False
        try:
            if "text/event-stream" not in answer.headers.get("Content-Type", ""):
                self._json(Answer(answer.status, answer.headers, self._read(answer)))
                raise RequestError(f"{self.url}{path} answered with one object where a stream of events was asked for")
            for line in self._lines(answer):
                if not line.startswith(DATA):
                    continue
                content = line[len(DATA) :].strip()
                if content == DONE:
                    is_complete = True
                    return
                event = self._json(Answer(answer.status, answer.headers, content))
                yield event
            raise RequestError(f"{self.url}{path}: the stream was cut off before its last event")
        finally:
            if is_complete:
                self._drain(answer)
            else:
                self.close()

    def _open_answer(self, connected: socket.socket, *given: Any, **named: Any) -> http.client.HTTPResponse:
        answer = http.client.HTTPResponse(connected, *given, **named)
        answer.fp.close()
        answer.fp = io.BufferedReader(DeadlineReader(connected, self._clock), _PIECE_BYTES)
        return answer

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> http.client.HTTPResponse:
        """Send a request and return its answer when it is no refusal, with the body still to be read."""
        content = None if body is None else json.dumps(body).encode()
        headers = self._headers if content is None else {**self._headers, "Content-Type": "application/json"}
        self._clock.until = time.monotonic() + self.timeout_s
        pause_s = _FIRST_PAUSE_S
        for attempts_left in range(self.retries, -1, -1):
            asked_s = None
            try:
                answer = self._attempt(method, self._path + path, content, headers)
                if 200 <= answer.status < 300:
                    return answer
                asked_s = retry_after_s(answer.headers) if answer.status in BUSY else None
                refusal = self._refusal(answer, path)
                if answer.status not in BUSY:
                    raise refusal
            except TimeoutError:
                self.close()
                raise RequestError(f"{self.url}{path} gave no answer within {self.timeout_s:g} s") from None
            except (OSError, http.client.HTTPException) as error:
                self.close()
                refusal = self._broken(error, path)
            wait_s = pause_s if asked_s is None else asked_s
            if not attempts_left or wait_s > min(_LONGEST_PAUSE_S, self._clock.until - time.monotonic()):
                raise refusal
            time.sleep(wait_s)
            pause_s *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _attempt(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        """Send a request once; a kept connection that the server has closed meanwhile is opened again."""
        was_open = self._connection.sock is not None
        try:
            return self._exchange(method, path, content, headers)
        except (ConnectionError, http.client.RemoteDisconnected):
            self.close()
            if not was_open:
                raise
        return self._exchange(method, path, content, headers)

    def _exchange(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        if self._connection.sock is None:
            self._connect()
        self._connection.sock.settimeout(self._clock.left_s())
        self._connection.request(method, path, content, dict(headers))
        return self._connection.getresponse()

    def _connect(self) -> None:
        limit_s = self._connection.timeout = min(self._clock.left_s(), _CONNECT_S)
        try:
            self._connection.connect()
        except TimeoutError:
            raise self._unreachable(f"no connection within {limit_s:g} s") from None

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while piece := self._piece(answer):
            pieces.append(piece)
            size += len(piece)
            if size > _MOST_BYTES:
                self.close()
                raise RequestError(f"the answer of {self.url} has more than {_MOST_BYTES >> 20} MiB")
        return b"".join(pieces)

    def _piece(self, answer: http.client.HTTPResponse) -> bytes:
        """Read what has arrived of a body; empty at its end."""
        try:
            piece = answer.read1(_PIECE_BYTES)
        except TimeoutError:
            self.close()
            raise RequestError(f"{self.url} did not finish its answer within {self.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise RequestError(f"the answer of {self.url} was cut off: {type(error).__name__}") from error
        if not piece and answer.length:
            self.close()
            raise RequestError(f"the answer of {self.url} was cut off: {answer.length} bytes are missing")
        return piece

    def _lines(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        rest, size = b"", 0
        while piece := self._piece(answer):
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines
            size = len(rest)
            if size > _MOST_BYTES:
                raise RequestError(f"an event of {self.url} has more than {_MOST_BYTES >> 20} MiB")

    def _drain(self, answer: http.client.HTTPResponse) -> None:
        """Read the end of a stream, so that the connection can be used again."""
        try:
            while self._piece(answer):
                pass
            answer.close()
        except RequestError:
            self.close()

    def _refusal(self, answer: http.client.HTTPResponse, path: str) -> UnreachableError | RequestError:
        """Return what a refusing status means, in the server's own words where it has some."""
        with answer:
            content = self._read(answer)
        place, status = f"{self.url}{path}", answer.status
        if 300 <= status < 400:
            target = shortened(answer.headers.get("Location", "another address"))
            return RequestError(
                f"{place} redirects to {target} (HTTP {status}), and no redirect is followed",
                "give the address that it redirects to",
            )
        said = self._said(content) or answer.reason
        if status in _REFUSED_KEY:
            key = f"the key in ${self._key_name}" if self._key_name else "a request without a key"
            return UnreachableError(
                f"{self.url} refuses {key} (HTTP {status}): {said}",
                "export the right key, and name its environment variable: endpoint_key_env=NAME",
            )
        return RequestError(f"{place} (HTTP {status}): {said}")

    def _said(self, content: bytes) -> str:
        """Return a server's own words, or the beginning of what it sent, without the key."""
        said = message(content) or summary(content)
        return said.replace(self._key, "***") if self._key else said

    def _broken(self, error: Exception, path: str) -> UnreachableError | RequestError:
        """Return what a connection that could not be made, or that broke before an answer, means."""
        reason = shortened(str(error) or type(error).__name__)
        if isinstance(error, _BROKE):
            return RequestError(f"{self.url}{path} gave no answer: {reason}")
        if isinstance(error, http.client.HTTPException):
            return RequestError(f"{self.url}{path} does not speak HTTP: {reason}")
        return self._unreachable(reason)

    def _unreachable(self, reason: str) -> UnreachableError:
        return UnreachableError(
            f"no server answers at {self.url}: {reason}", "start it, or give the right address with --endpoint"
        )

    def _json(self, answer: Answer) -> Any:
        try:
            found = json.loads(answer.content)
        except ValueError:
            kind = answer.headers.get("Content-Type", "no type")
            raise RequestError(
                f"{self.url} answered with {kind} that is not JSON: {self._said(answer.content)}",
                "give the base URL of an OpenAI API, not that of a web page or of a proxy's login",
            ) from None
        if isinstance(found, dict) and found.get("error"):
            raise RequestError(f"{self.url}: {self._said(answer.content)}")
        return found
