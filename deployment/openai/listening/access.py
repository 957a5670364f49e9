"""Who may ask, and what is noted of each request."""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TextIO

from aiohttp import web

from deployment.openai.errors import ApiError
from deployment.openai.service import RECORD
from handover.errors import ConfigError
from handover.regular_file import SETTINGS_BYTES, read_text

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_OPEN = ("/health", "/metrics", "/version")
"""Paths for probes and collectors, which have no key."""
_SCHEME = "bearer"
_HUNG_UP = 499
"""Status that logs give to a request whose client has gone before the answer was complete."""


def read_keys(path: Path | None) -> tuple[bytes, ...]:
    """Read a file with a key a line; empty lines and those that begin with # do not count.

    Raises:
        ConfigError: the file cannot be read, or it has no key, so that every client would be refused.
    """
    if path is None:
        return ()
    try:
        lines = read_text(path, SETTINGS_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the keys in {path} cannot be read: {error}", "give a text file with a key a line"
        ) from error
    keys = tuple(line.strip().encode() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no key", "write a key a line, or leave api_keys_file out")
    return keys


def check_key(request: web.Request, keys: Sequence[bytes]) -> None:
    """Refuse a request without one of the keys, if there are any; the time that it takes tells nothing about them.

    Raises:
        ApiError: the key is missing or wrong.
    """
    if not keys or request.path in _OPEN:
        return
    scheme, _, given = request.headers.get("Authorization", "").strip().partition(" ")
    given = given.strip() if scheme.lower() == _SCHEME else request.headers.get("x-api-key", "").strip()
    key = given.encode("utf-8", "surrogateescape")
    if not any([hmac.compare_digest(key, each) for each in keys]):  # a list: every key is compared
        raise ApiError(
            "the API key is wrong" if key else "an API key is missing",
            "send the header 'Authorization: Bearer KEY'",
            status=401,
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


class AccessLog:
    """A file with a JSON line for each request.

    Args:
        path: of the file, which is continued; None: nothing is noted.
    """

    def __init__(self, path: Path | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1, encoding="utf-8")

    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request, and note it."""
        started, status = time.monotonic(), _HUNG_UP
        try:
            response = await handler(request)
            status = response.status
            return response
        except asyncio.CancelledError:
            status = _HUNG_UP
            raise
        except ConnectionError:  # the client has gone in the middle of its body or of the answer
            status = _HUNG_UP
            return web.Response(status=status)
        finally:
            self._write(request, status, time.monotonic() - started)

    def _write(self, request: web.Request, status: int, took_s: float) -> None:
        if self._file is None:
            return
        record = request[RECORD]
        line = {
            "time": round(time.time(), 3),
            "request_id": record.id,
            "remote": request.remote,
            "method": request.method,
            "path": request.path,
            "status": status,
            "duration_ms": round(1000 * took_s, 1),
            "model": record.model or None,
            **record.usage,
        }
        self._file.write(json.dumps(line) + "\n")
