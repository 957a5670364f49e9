"""Serve the metrics of all replicas as one page: ``python3 -m deployment.replicas.page --help``."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import AF_INET6
from typing import ClassVar

from deployment.doors.address import own_address
from deployment.processes.heartbeat import Beating
from deployment.processes.watched import WatchedProcess
from deployment.replicas.summed import SummedPages
from handover.arguments import ScriptArguments, option
from handover.endpoint import Endpoint
from handover.errors import ServerError, exit_status
from handover.ranges import PORT

_QUESTION_S = 5.0
_MOST_BYTES = 16 << 20
_MOST_READERS = 16
_PATH = "/metrics"
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not lead to these hosts


@dataclass(frozen=True)
class PageArguments(ScriptArguments):
    """Serve the metrics of all replicas as one page."""

    host: str = field(metadata={"help": "address to listen on"})
    endpoints: tuple[str, ...] = field(metadata={"help": "JSON list: the endpoint file of each replica"})
    port: int = option(0, "to listen on", PORT)


class PageProcess(WatchedProcess):
    """The page's process."""

    def __init__(self, arguments: PageArguments, log: Path) -> None:
        address = own_address(arguments.host)
        self._url = f"http://{f'[{address}]' if ':' in address else address}:{arguments.port}{_PATH}"
        super().__init__("deployment.replicas.page", arguments, log, "the page of metrics", "it")

    def is_up(self) -> bool:
        """Ask for the page."""
        with _OPENER.open(self._url, timeout=_QUESTION_S):
            return True


class Pages:
    """Asks every replica that serves, one reader at a time.

    Args:
        files: endpoint file of each replica.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files, self._summed, self._lock = files, SummedPages(), threading.Lock()

    def read(self) -> bytes:
        """Return the page as it is now."""
        with self._lock:
            present = {number: self._ask(number, file) for number, file in enumerate(self._files)}
            return self._summed.render(present).encode()

    def _ask(self, number: int, file: Path) -> bool:
        try:
            start = file.stat().st_mtime_ns
            with _OPENER.open(metrics_url(Endpoint.read(file)), timeout=_QUESTION_S) as answer:
                text = answer.read(_MOST_BYTES).decode(errors="replace")
        except (OSError, ServerError):
            return False
        self._summed.add(number, start, text)
        return True


def metrics_url(endpoint: Endpoint) -> str:
    """Return where a server has its metrics: a program of its own beside its API, Triton at a port of their own."""
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    return f"http://{host}:{endpoint.metrics_port or endpoint.http_port}{_PATH}"


class _Handler(BaseHTTPRequestHandler):
    timeout = _QUESTION_S
    pages: ClassVar[Pages]
    readers: ClassVar[threading.Semaphore]

    def do_GET(self) -> None:
        """Answer with the page; others than a few at a time are sent away."""
        if self.path.partition("?")[0] != _PATH:
            return self.send_error(404)
        if not self.readers.acquire(blocking=False):
            return self.send_error(503)
        try:
            page = self.pages.read()
        finally:
            self.readers.release()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, format: str, *words: object) -> None:
        """Stay quiet."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True


def main(argv: Sequence[str]) -> None:
    """Serve until ended."""
    arguments = PageArguments.from_argv(argv, __doc__)
    names = {"pages": Pages([Path(file) for file in arguments.endpoints]),
             "readers": threading.Semaphore(_MOST_READERS)}  # fmt: skip
    kind = type("_V6", (_Server,), {"address_family": AF_INET6}) if ":" in arguments.host else _Server
    server = kind((arguments.host, arguments.port), type("_Served", (_Handler,), names))
    beating = Beating()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        beating.beat()
        time.sleep(1)


if __name__ == "__main__":
    raise SystemExit(exit_status(main, "metrics"))
