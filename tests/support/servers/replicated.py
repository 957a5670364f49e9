"""Several servers of one model behind a router for tests, in a process of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.request import Request

from deployment.arguments import EngineArguments, ReplicasArguments, ServeArguments
from deployment.processes.linux import Process, command_line, descendants
from handover.endpoint import Endpoint
from support.servers.served import PROJECT, wait_for


class Replicated:
    """``python -m deployment.replicas.serve``.

    Args:
        server: arguments of a server, whose directory of the endpoint file is the deployment's.
        body: of a completion.
        environment: variables beside those of this process.
        settings: of the router.
    """

    def __init__(
        self,
        server: EngineArguments | ServeArguments,
        body: Mapping[str, Any],
        environment: Mapping[str, str] = MappingProxyType({}),
        **settings: Any,
    ) -> None:
        self.place, self.file, self._body = server.endpoint.parent, server.endpoint, body
        self.output = self.place.with_name("output.txt")
        given = server.to_argv()
        program = "deployment.engines.serve" if isinstance(server, EngineArguments) else "deployment.serve"
        arguments = ReplicasArguments(program, given, **settings)
        with self.output.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deployment.replicas.serve", *arguments.to_argv()],
                cwd=PROJECT,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        wait_for(lambda: "serving" in self.text or self.process.poll() is not None)
        assert self.process.poll() is None, self.text
        self.endpoint = Endpoint.read(self.file)
        self.url = self.endpoint.openai_url or f"http://{self.endpoint.host}:{self.endpoint.openai_port}/v1"

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def processes(self) -> list[Process]:
        return descendants([self.process.pid])

    def pids_of(self, word: str) -> list[int]:
        """Processes with a word in their command line, or with that end of a program's path."""
        lines = {each.pid: command_line(each.pid) for each in self.processes}
        return [pid for pid, line in lines.items() if word in line or line and line[0].endswith(f"/{word}")]

    def request(self, header: str = "", **more: Any) -> Request:
        headers = {"Content-Type": "application/json"} | ({"X-Session-Id": header} if header else {})
        return Request(f"{self.url}/completions", json.dumps({**self._body, **more}).encode(), headers)

    def ask(self, **more: Any) -> Any:
        return urllib.request.urlopen(self.request(**more), timeout=180)

    def is_answered(self) -> bool:
        try:
            with self.ask() as answer:
                return bool(json.load(answer)["choices"])
        except (OSError, HTTPException):
            return False

    def metrics(self) -> dict[str, float]:
        """The page by the text of its samples."""
        url = f"http://{self.endpoint.host}:{self.endpoint.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=180) as page:
            lines = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def serving(self) -> int:
        return int(self.metrics()["slipway_replicas_serving"])

    def stop(self) -> None:
        """End it in good order; nothing of it is left."""
        processes = self.processes
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(240) == 0, self.text
        assert not list(self.place.glob("**/.endpoint*")) and not self.file.exists()
        wait_for(lambda: not [each for each in processes if command_line(each.pid)])


@contextmanager
def stopped_at_last(served: Replicated) -> Iterator[Replicated]:
    """Stop it in good order behind the block; whatever happens there, no process stays."""
    try:
        yield served
        served.stop()
    finally:
        served.process.kill()
        served.process.wait()


class Stream(threading.Thread):
    """A client that reads one stream to its end; ``server`` is who answers, where the stream says it."""

    def __init__(self, served: Replicated, header: str = "", **more: Any) -> None:
        super().__init__()
        self._request = served.request(header, stream=True, **more)
        self.server, self.events, self.is_whole, self.error = "", 0, False, ""
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._request, timeout=120) as answer:
                while piece := answer.read1(65536):  # by lines http.client would hide that a stream is cut
                    if found := re.search(rb'"system_fingerprint": "(\d+)"', piece):
                        self.server = found[1].decode()
                    self.events += piece.count(b"data: {")
                    self.is_whole |= piece.endswith(b"data: [DONE]\n\n")
        except (OSError, HTTPException) as error:
            self.error = repr(error)


class Clients:
    """Clients that ask for one stream after another until it is over."""

    def __init__(self, served: Replicated, number: int, **more: Any) -> None:
        self._served, self._more = served, more
        self.streams, self._is_over = list[Stream](), threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            stream = Stream(self._served, **self._more)
            stream.join()
            self.streams.append(stream)

    def end(self) -> list[Stream]:
        """Return all streams, whole and cut ones."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        return self.streams


def noted_as_run(served: Replicated) -> Path:
    """Note the deployment as the runner does, for the commands that look after a run; return its results directory."""
    logs = served.place.parent / "logs"
    logs.mkdir()
    (logs / "stages.json").write_text(json.dumps([{"stage": "deploy", "output": str(served.place)}]))
    return served.place.parent
