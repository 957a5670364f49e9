"""One server for all tests of this directory, which only ask: a GPT that streams, with its OpenAI endpoint."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.servers.served import PROJECT, Deployment
from transformers import GPT2Tokenizer

from export_scripts.arguments import ConvertArguments, ExportArguments
from export_scripts.convert import convert
from export_scripts.repository.model_repository import build_repository
from handover.endpoint import Endpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("convert") / "1-gpu"
    convert(ConvertArguments(PROJECT / "tests" / "data" / "nemo" / "gpt122_tp1_pp1.nemo", output, 1, "fp32"))
    return output


@pytest.fixture(scope="session")
def deployment(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    output = tmp_path_factory.mktemp("export") / "model_repo"
    arguments = ExportArguments(checkpoint, output, "gpt", 1, 1, "fp32", 0, 0, max_batch_size=8, decoupled=True)
    build_repository(replace(arguments, text_deltas=True))
    running = Deployment(output, tmp_path_factory.mktemp("deployment"), openai_port=0)
    published = running.wait_until_published()
    assert f"openai     http://127.0.0.1:{published.openai_port}/v1" in running.text
    yield running
    assert running.stop() == 0, running.text
    assert running.processes == {}  # the endpoint has ended with the server
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", published.openai_port or 0))


@pytest.fixture(scope="session")
def triton(deployment: Deployment) -> Endpoint:
    return Endpoint.read(deployment.endpoint_file)


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> GPT2Tokenizer:
    return GPT2Tokenizer(str(checkpoint / "vocab.json"), str(checkpoint / "merges.txt"))
