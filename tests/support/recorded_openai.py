"""Recorded answers of a server, given again to the very requests that they were recorded for.

A recording is a JSON file with a list of exchanges; an answer that is no JSON is kept as lines. A request that is not
in it is refused, unless ``$RECORD_VLLM`` is the address of a running server: then that is asked, and the file extended.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

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


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recording: Recording

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:  # noqa: N802 (the library's name)
        self._answer(None)

    def do_POST(self) -> None:  # noqa: N802 (the library's name)
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any] | None) -> None:
        status, kind, content = self.recording.answer({"method": self.command, "path": self.path, "body": body})
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def replaying(file: Path) -> Iterator[Recording]:
    """Serve a recording on a free port of loopback; every request must be in it."""
    recording = Recording(file)
    handler = type("Handler", (_Handler,), {"recording": recording})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    recording.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield recording
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert recording.missing == []
