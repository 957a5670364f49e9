"""HTTP servers for tests: a handler of JSON requests, and a free port of loopback to serve it on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JsonHandler(BaseHTTPRequestHandler):
    """Reads JSON bodies, and leaves the answers to ``answer``."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:  # noqa: N802 (the library's name)
        self.answer(None)

    def do_POST(self) -> None:  # noqa: N802 (the library's name)
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def answer(self, body: dict[str, Any] | None) -> None:
        """Answer a request; a GET has no body."""
        raise NotImplementedError

    def send(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        """Send a whole answer; headers may say another length than the content has."""
        self.send_response(status)
        for name, text in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[int]:
    """Serve on a free port of loopback, which is yielded."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
