"""The OpenAI endpoint in front of a running server: in a process of its own, or its application in this one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from aiohttp.test_utils import TestClient, TestServer

from deployment.openai.arguments import OpenAIArguments
from deployment.openai.engine.triton import Triton
from deployment.openai.listening.access import read_keys
from deployment.openai.listening.application import build_application
from deployment.openai.models import find_models
from deployment.openai.service import Service
from handover.endpoint import Endpoint
from support.servers.served import PROJECT, wait_for


class OpenAIEndpoint:
    """An endpoint that listens.

    Args:
        process: of it.
        output: file of what it prints.
    """

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process, self.output = process, output
        wait_for(lambda: "/v1" in self.text or process.poll() is not None)
        found = re.search(r"(http://\S+)/v1", self.text)
        assert found, self.text
        self.url = found.group(1)

    @property
    def text(self) -> str:
        return self.output.read_text()

    def get(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any]:
        """Status and content of an answer; a body is sent by POST."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json", **headers})
        try:
            with urlopen(request, timeout=180) as answer:
                status, content = answer.status, answer.read()
        except HTTPError as error:
            status, content = error.code, error.read()
        return status, json.loads(content) if content.startswith(b"{") else content.decode()

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a stream, which must end with [DONE]."""
        request = Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=180) as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            text = answer.read().decode()
        assert text.endswith("data: [DONE]\n\n")
        return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]


@contextmanager
def openai_endpoint(
    endpoint: str, directory: Path, most_files: int | None = None, **settings: Any
) -> Iterator[OpenAIEndpoint]:
    """Run ``python -m deployment.openai``; it must end in good order and without a traceback."""
    output = directory / "openai.txt"
    arguments = OpenAIArguments(endpoint, **settings)
    command = [sys.executable, "-m", "deployment.openai", *arguments.to_argv()]
    if most_files is not None:
        command = ["prlimit", f"--nofile={most_files}", *command]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
        )
    try:
        yield OpenAIEndpoint(process, output)
        process.terminate()
        assert process.wait(240) == 0, output.read_text()
        assert "Traceback" not in output.read_text(), output.read_text()
    finally:
        process.kill()
        process.wait(240)


@asynccontextmanager
async def application_of(url: str, tokenizer: Path, **settings: Any) -> AsyncIterator[TestClient[Any, Any]]:
    """The endpoint's application in this process, in front of a server at ``url``, with aiohttp's client for tests."""
    arguments = OpenAIArguments(url, tokenizer=tokenizer, **{"end_id": 1, **settings})
    triton = Triton(url)
    models = await find_models(arguments, Endpoint.read(url), triton)
    keys, of_adapters = read_keys(arguments.api_keys_file), read_keys(arguments.adapter_keys_file)
    service = Service(arguments, triton, models, keys, adapter_keys=of_adapters)
    try:
        server = TestServer(build_application(service))
        await server.start_server(auto_decompress=False)
        async with TestClient(server) as client:
            yield client
    finally:
        await triton.close()
