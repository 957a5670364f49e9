"""Recorded answers of a server, given again to the very requests that they were recorded for.

A recording is a JSON file with a list of exchanges; an answer that is no JSON is kept as lines. A request that is not
in it is refused, unless ``$RECORD_VLLM`` is the address of a running server: then that is asked, and the file extended.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from support.servers.loopback_http import JsonHandler, listening

UPSTREAM = os.environ.get("RECORD_VLLM", "")


class Recording:
    """The exchanges of one file.

    Attributes:
        url: base URL of the API while it is served.
        missing: requests that were not recorded.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.url, self.missing = file, "", list[dict[str, Any]]()
        self._exchanges: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []

    def answer(self, request: dict[str, Any]) -> tuple[int, str, bytes]:
        """Status, content type and body for a request."""
        found = next((each for each in self._exchanges if each["request"] == request), None)
        if found is None and UPSTREAM:
            found = _ask(request)
            self._exchanges.append(found)
            lines = ",\n".join(json.dumps(each, ensure_ascii=False) for each in self._exchanges)
            self.file.write_text(f"[\n{lines}\n]\n")
        if found is None:
            self.missing.append(request)
            return 501, "text/plain", b"this request was not recorded: tests/data/vllm/README.md"
        content = found["answer"]
        text = json.dumps(content) if "json" in found["content_type"] else "\n".join(content)
        return found["status"], found["content_type"], text.encode()


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    """Ask the server that is recorded."""
    body = None if request["body"] is None else json.dumps(request["body"]).encode()
    asked = Request(UPSTREAM + request["path"], body, {"Content-Type": "application/json"}, method=request["method"])
    try:
        with urlopen(asked, timeout=120) as answer:
            status, kind, content = answer.status, answer.headers["Content-Type"], answer.read().decode()
    except HTTPError as error:
        status, kind, content = error.code, error.headers["Content-Type"], error.read().decode()
    is_json = "json" in kind
    return {
        "request": request,
        "status": status,
        "content_type": kind,
        "answer": json.loads(content) if is_json else content.split("\n"),
    }


class _Handler(JsonHandler):
    recording: Recording

    def answer(self, body: dict[str, Any] | None) -> None:
        status, kind, content = self.recording.answer({"method": self.command, "path": self.path, "body": body})
        self.send(status, {"Content-Type": kind}, content)


@contextmanager
def replaying(file: Path) -> Iterator[Recording]:
    """Serve a recording on a free port of loopback; every request must be in it."""
    recording = Recording(file)
    with listening(type("Handler", (_Handler,), {"recording": recording})) as port:
        recording.url = f"http://127.0.0.1:{port}/v1"
        yield recording
    assert recording.missing == []
